"""For tests of pipelines and of your own operators: nothing here sleeps.

>>> from pipegraph import Graph, operators as ops
>>> from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere
>>> def make_graph():
...     graph = Graph("squares")
...     graph.add(ops.FromIterable(range(5))).then(lambda x: x * x, name="square", workers=2)
...     return graph
>>> assert_same_everywhere(make_graph)
>>> assert_resumes_exactly(make_graph)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.importing import lazy_names
from pipegraph.testing.outcome import fingerprint as fingerprint
from pipegraph.testing.promises import (
    assert_resumes_exactly as assert_resumes_exactly,
    assert_same_everywhere as assert_same_everywhere,
)

if TYPE_CHECKING:
    from pipegraph.testing.leaks import Resources as Resources, no_leaks as no_leaks

# The one part that needs pytest.
__getattr__, __dir__, _ = lazy_names(__name__, {"leaks": "Resources no_leaks"})
