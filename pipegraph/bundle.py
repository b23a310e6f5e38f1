"""Several consecutive samples that are handed over together, each still a sample of its own.

Handing a small row to another thread costs more than reading it. So between a source, the one-to-one
stages behind it and the ``Batch`` that collects their rows, rows travel in bundles (``bundle_chains`` says
where, ``bundle_size`` how many at a time). A bundle is no batch: nothing but the hand-over is
shared. What makes it invisible:

* Its samples are neighbours: sample i's cursors are ``(before + i, before + i + 1)``, as if it had come
  alone. A sample that fails, or is skipped, ends the bundle before it; so a state taken anywhere is that
  of the unbundled graph, and each loads the other's.
* Every stage works on sample after sample, with that sample's key, lineage, generator and policy.
* A bundle never reaches past the end of the batch that its samples belong to (before a sample was
  skipped), so none waits for one that comes later than its own batch needs; except those of a list or a
  range, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

from pipegraph.chunk import Chunk, Lineages

UNNAMED = object()
"""In place of a sample's key: nothing has fixed it yet."""


class Bundle(Chunk):
    """See the module docstring.

    Attributes:
        data: the list of samples.
        before, after: steps of the source.
        names: the key of each sample as far as it is fixed, else ``UNNAMED``; None where none is.
        packed: instead of ``data``, all samples as the ``Batch`` that collects them packs them.
    """

    __slots__ = ("names", "packed")
    lineages: Lineages

    def __init__(
        self,
        data: list[Any],
        lineages: Lineages,
        epoch: int,
        before: int,
        names: list[Any] | None = None,
    ) -> None:
        super().__init__(data, lineages, epoch, before, before + len(lineages))
        self.names = names
        self.packed: Any = None

    def pack(self, pack: Callable[[list[Any]], Any]) -> None:
        """Let ``pack`` put the samples together, if it can."""
        packed = pack(self.data)
        if packed is not None:
            self.names = named(self.data, self.names)
            if isinstance(self.data[0], Mapping):
                self.names = _keys(self)  # as ``Chunk.group`` would fix them
            self.packed, self.data = packed, ()

    def items(self) -> list[Any]:
        """The samples."""
        found: list[Any] = self.data if self.packed is None else self.packed.rows()
        return found

    def one(self, index: int) -> Chunk:
        """Sample ``index`` by itself."""
        names, before = self.names, self.before + index
        keys = None if names is None or names[index] is UNNAMED else (names[index],)
        return Chunk(self.data[index], (self.lineages[index],), self.epoch, before, before + 1, keys)

    def part(self, start: int, stop: int) -> Bundle:
        """Samples ``start`` to ``stop``; their memory is still this bundle's."""
        names = None if self.names is None else self.names[start:stop]
        lineages = self.lineages[start:stop]
        part = Bundle(self.data[start:stop], lineages, self.epoch, self.before + start, names)
        if self.packed is not None:
            part.packed = self.packed.part(start, stop)
        return part


def named(data: list[Any], names: list[Any] | None) -> list[Any] | None:
    """``names`` with the keys that plain dicts bring along."""
    if dict not in set(map(type, data)):
        return names
    found = [UNNAMED] * len(data) if names is None else list(names)
    for index, item in enumerate(data):
        if item.__class__ is dict and found[index] is UNNAMED and "key" in item:
            found[index] = item["key"]
    return found


def joined(bundles: Sequence[Bundle]) -> Chunk:
    """The chunk of the samples of consecutive bundles, which has no data yet.

    Identity is as :meth:`Chunk.group` has it.
    """
    first = bundles[0]
    lineages = first.lineages
    if len(bundles) > 1:
        lineages = Lineages(
            lineages.source, [position for bundle in bundles for position in bundle.lineages.positions]
        )
    grouped = Chunk(None, lineages, first.epoch, first.before, bundles[-1].after, None, True)
    with_keys = first.packed is None and isinstance(first.data[0], Mapping)
    if with_keys or any(bundle.names is not None for bundle in bundles):
        grouped.keys = tuple([key for bundle in bundles for key in _keys(bundle)])
    return grouped


def _keys(bundle: Bundle) -> list[Any]:
    names = bundle.names
    # By identity: keys may be arrays, which compare as they like.
    if names is not None and not any(map(is_, names, repeat(UNNAMED))):
        return names
    if bundle.packed is None:
        return [bundle.one(index).keys[0] for index in range(len(bundle.lineages))]
    names = names or [UNNAMED] * len(bundle.lineages)
    return [
        at if name is UNNAMED else name for name, at in zip(names, bundle.lineages.positions, strict=True)
    ]
