"""``Cache``: a memo in memory, by source index. Never changes what is delivered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.engine.stage.cache_wiring import Hit
from pipegraph.errors import GraphError, shown
from pipegraph.forks import lock_free_after_fork
from pipegraph.tree import buffers, copy_containers, map_leaves, own_memory
from pipegraph.units import parse_bytes

Value = tuple[tuple[Any, ...] | None, Any]
"""A sample's keys, None where its position is its key, and its data."""


def _kept(leaf: Any) -> Any:
    """A leaf as it is kept."""
    if hasattr(type(leaf), "__next__"):
        raise GraphError(
            f"Cache: a result is or contains {shown(leaf)}, which can be read only once; return a list"
        )
    return own_memory(leaf)


class _Memory:
    """Values by index. Thread-safe. What is kept stays, so that a scan larger than the limit still hits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = lock_free_after_fork()
        self._used = 0
        self._values: dict[Any, Value] = {}

    def get(self, index: Any) -> Value | None:
        with self._lock:
            value = self._values.get(index)
        return None if value is None else (value[0], copy_containers(value[1]))

    def put(self, index: Any, value: Value) -> None:
        size = sum(nbytes for _, nbytes in buffers(value[1])) + 64
        with self._lock:
            if self._used + size > self._limit or index in self._values:
                return
            self._used += size
        own = (value[0], map_leaves(_kept, value[1]))
        with self._lock:
            if self._values.setdefault(index, own) is not own:
                self._used -= size  # another thread has kept it meanwhile


@final
class Cache(Operator):
    """Keep results in memory, so that later epochs take them from here and skip the stages above.

    The stages above must be a random-access source that identifies its samples (``index_of``), and one-to-one stages
    whose result depends only on their item. Functions are assumed to be such, unless they have a parameter ``rng``;
    operators declare it with ``depends_on``. If a function uses torch's random functions, that is an error when it
    happens (in worker processes it is not noticed).

    Each loader has its own cache. Results that do not fit into the limit are computed again in each epoch; results that
    are in the cache stay there. To keep results between runs, put ``joblib.Memory(folder).cache`` around the function.

    What the training loop changes in the dataset, or in what a function above reads, is not seen: make another loader
    then. A stage below must not change results in place (``x + 1``, not ``x += 1``): what is kept changes too.

    Args:
        limit: bytes, or a text such as ``"20 GB"``.

    Raises:
        GraphError: ``limit`` is not a size. At the plan: the source above is not random-access or does not identify its
            samples, or a stage between is not one-to-one, depends on more than its item, or does not declare it. While
            it runs: a stage above has used torch's random functions.
    """

    traits = Traits(seeds_itself=True, in_trainer=True, caches=True)
    name = "cache"
    needs = "sample"

    def __init__(self, limit: int | str) -> None:
        self.limit = parse_bytes(limit, "Cache: limit")
        self._store: _Memory
        self._index_of: Callable[[int, int], Any]

    def config(self) -> dict[str, Any]:
        return {}  # it never changes what is delivered

    def open(self, context: Context) -> None:
        # Of one loader: what another one's training loop does to its samples in place must not be seen here.
        self._store = context.share("memo", lambda: _Memory(self.limit))

    def attach(self, index_of: Callable[[int, int], Any]) -> None:
        """Called by the runtime: how positions become indices."""
        self._index_of = index_of

    def lookup(self, index: Any) -> Hit | None:
        """What the stages above would make of the source's sample ``index``, if it is known."""
        value = self._store.get(index)
        return None if value is None else Hit(*value)

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if data.__class__ is Hit:
            chunk.keys, chunk.data = data.keys, data.value
            return chunk
        position = chunk.lineages[0][1]
        kept = (chunk.own_keys, data)  # another epoch has the sample at another position
        self._store.put(self._index_of(position, chunk.epoch), kept)
        return chunk
