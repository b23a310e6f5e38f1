"""Memory views cross to and from processes as what they are."""

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops

NUMBERS = np.arange(6, dtype=np.int32)
VIEWS = {
    "bytes": memoryview(b"abc"),
    "writable": memoryview(bytearray(b"abc")),
    "shaped": memoryview(NUMBERS.reshape(2, 3)),
    "strided": memoryview(NUMBERS)[::2],
    "large": memoryview(np.arange(50_000.0)),
    "empty": memoryview(b""),
}


class Views:
    def __call__(self, _):
        return VIEWS


def seen(sample):
    return {
        name: (type(view), view.format, view.shape, view.readonly, view.tobytes())
        for name, view in sample.items()
    }


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_memoryview_stays_one(backend):
    graph = pg.Graph("views")
    graph.add(ops.FromIterable([0])).then(Views(), backend=backend, name="views").then(
        seen, backend=backend, ordered=False
    )
    with graph.loader("views") as loader:
        assert [seen(sample) for sample in loader] == [seen(VIEWS)]
    with graph.loader() as loader:
        assert list(loader) == [seen(VIEWS)]
