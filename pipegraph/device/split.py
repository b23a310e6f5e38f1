"""Cuts a batch into one part per device. Pure.

Legend: a *tree* is any nest of tuples, named tuples, lists, mappings and
dataclasses; *rows* are the size of a tensor along the cut dimension.

The rules are DataParallel's (a tensor is cut by ``chunk``, containers inside
are followed, everything else goes whole to every part) with two of its mistakes
left out: inputs with unequal row counts are an error that names them, not silently cut,
and a small last batch gives fewer parts for positional and keyword arguments alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from pipegraph.batches import Whole as Whole
from pipegraph.device.backend import Event, normalised, sent
from pipegraph.tree import is_dataclass_value, is_namedtuple, named, rebuilt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CutRule:
    """How objects of one type are cut; see :func:`register_scatter`."""

    rows: Callable[[Any, int], int]
    cut: Callable[[Any, Sequence[int], int], Sequence[Any]]
    move: Callable[[Any, torch.device], Any]


_rules: dict[type, CutRule] = {}


def register_scatter(
    kind: type[T],
    *,
    rows: Callable[[T, int], int],
    cut: Callable[[T, Sequence[int], int], Sequence[T]],
    move: Callable[[T, torch.device], T],
) -> None:
    """Teach scatter a type of its own, for this process; subclasses included.

    Args:
        kind: the type.
        rows: ``rows(obj, dim)``, how many rows it has.
        cut: ``cut(obj, sizes, dim)``, one part per size, in order.
        move: ``move(obj, device)``, a part on the replica's device.
    """
    _rules[kind] = CutRule(rows, cut, move)


def rule_for(obj: object) -> CutRule | None:
    """The registered rule of an object's type, or of its nearest base."""
    for kind in type(obj).__mro__:
        if kind in _rules:
            return _rules[kind]
    return None


def children(obj: Any) -> Mapping[Any, Any] | None:
    """As :func:`pipegraph.tree.named`; tensors, :class:`Whole` and registered types are leaves."""
    return None if isinstance(obj, torch.Tensor | Whole) or rule_for(obj) is not None else named(obj)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf replaced; registered types and :class:`Whole` are leaves."""
    below = children(tree)
    if below is None:
        return function(tree)
    return rebuilt(tree, [map_tree(function, entry) for entry in below.values()])


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; raises TypeError where one is packed."""
    refuse_packed(tree)
    below = children(tree)
    if below is None:
        yield path, tree
        return
    for name, entry in below.items():
        by_name = is_namedtuple(tree) or is_dataclass_value(tree)
        yield from leaves(entry, path + (f".{name}" if by_name else f"[{name!r}]"))


def _leaf_rows(leaf: Any, dim: int) -> int | None:
    rule = rule_for(leaf)
    if rule is not None:
        return rule.rows(leaf, dim)
    if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
        return leaf.size(dim)
    return None


def rows_of(tree: Any, dim: int = 0, name: str = "inputs") -> int | None:
    """Rows along `dim` of the first tensor found, or None if nothing in `tree` has rows.

    Raises:
        ValueError: two tensors have unequal row counts; says which.
    """
    first: tuple[str, int] | None = None
    for path, leaf in leaves(tree):
        rows = _leaf_rows(leaf, dim)
        if rows is None:
            continue
        if first is None:
            first = (path, rows)
        elif first[1] != rows:
            raise ValueError(
                f"scatter: all tensors need the same number of rows along dim {dim}, but {name}{first[0]} "
                f"has {first[1]} and {name}{path} has {rows}: wrap what every replica needs uncut in "
                "pg.replicas.Whole(...)"
            )
    return None if first is None else first[1]


def chunk_sizes_for(rows: int, parts: int) -> list[int]:
    """Rows of each part as ``torch.chunk`` deals them: ceil-sized, and fewer parts when rows run out.

    >>> chunk_sizes_for(9, 4), chunk_sizes_for(2, 4)
    ([3, 3, 3], [1, 1])
    """
    if rows == 0:
        return [0]
    size = -(-rows // parts)
    return [min(size, rows - start) for start in range(0, rows, size)]


def cut(tree: Any, sizes: Sequence[int], dim: int = 0, *, lists: bool = False) -> list[Any]:
    """Cut a tree into ``len(sizes)`` trees, on the device where it lies, without copying.

    Each part's tensors have version counters of their own, so an in-place
    change of one part leaves the backward of the others alone. Tensors that need gradients
    are copied for the same reason (differentiably).

    Args:
        sizes: rows of each part; their sum is the batch's rows.
        lists: also cut NumPy arrays, and lists without tensors, that have the batch's row count
            (captions, keys); otherwise they go whole to every part.
    """
    rows = sum(sizes)
    whole = [tree] * len(sizes)
    rule = rule_for(tree)
    if rule is not None:
        return list(rule.cut(tree, sizes, dim))
    if isinstance(tree, Whole):
        return whole
    if isinstance(tree, torch.Tensor):
        if tree.dim() == 0:
            return [Whole(tree)] * len(sizes)
        return _cut_tensor(tree, sizes, dim)
    if lists and isinstance(tree, np.ndarray):
        return _cut_array(tree, sizes, dim)
    below = children(tree)
    if not below:
        return whole
    if lists and type(tree) is list and len(tree) == rows and not _holds_tensors(tree):
        return [tree[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    cut_entries = [cut(entry, sizes, dim, lists=lists) for entry in below.values()]
    return [rebuilt(tree, [parts[i] for parts in cut_entries]) for i in range(len(sizes))]


def refuse_packed(tree: Any) -> None:
    """Refuse a packed sequence, whose tensors are not cut or joined by rows, unless its type is registered.

    Raises:
        TypeError: it is one.
    """
    if isinstance(tree, PackedSequence) and rule_for(tree) is None:
        raise TypeError(
            "a PackedSequence is not split or joined by rows: pass padded sequences and their lengths to the module, "
            "which packs its part, and return them padded (torch.nn.utils.rnn.pad_packed_sequence)"
        )


def _holds_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, (torch.Tensor, Whole)) or rule_for(leaf) for _, leaf in leaves(tree))


def _cut_array(array: np.ndarray[Any, Any], sizes: Sequence[int], dim: int) -> list[Any]:
    """By rows along `dim`, or along the only dimension; whole where it has another number of rows."""
    axis = 0 if array.ndim == 1 else dim
    if not -array.ndim <= axis < array.ndim or array.shape[axis] != sum(sizes):
        return [array] * len(sizes)
    return list(np.split(array, np.cumsum(sizes)[:-1], axis))


def _cut_tensor(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    parts = [tensor] if len(sizes) == 1 else torch.split(tensor, list(sizes), dim)
    # `.data` has a version counter of its own; a view that needs gradients has not.
    differentiable = torch.is_grad_enabled() and tensor.requires_grad
    return [part.clone() if differentiable else part.data for part in parts]


def moved(tree: Any, device: torch.device) -> Any:
    """A cut part on its device: tensors moved, differentiably, ``Whole`` opened.

    From pinned memory the copy is asynchronous, on the current stream. Tensors
    that already lie there are passed on as they are, except those of a
    ``Whole``, which get a version counter of their own.
    """

    def move(leaf: Any) -> Any:
        rule = rule_for(leaf)
        if rule is not None:
            return rule.move(leaf, device)
        if isinstance(leaf, Whole):
            return map_tree(lambda inner: _own(inner, device), leaf.value)
        return sent(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    return map_tree(move, tree)


def _own(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    there = sent(leaf, device)
    if there is not leaf:
        return there
    return leaf.clone() if leaf.requires_grad else leaf.data


class Scattered(Sequence[Any]):
    """A sequence of per-device batches; immutable.

    Args:
        parts: one batch per device, in the order of `devices`. A batch with
            fewer rows than devices has fewer parts: `devices` then has as many entries as `parts`.
        devices: where each part lies.
        ready: per part the event after which it may be read, or None where
            it may be read at once. Who reads part i makes its stream wait first: ``scattered.wait(i)``.
        rows: of each part; None where its tensors tell.
    """

    __slots__ = ("_parts", "devices", "ready", "rows")

    def __init__(
        self,
        parts: Iterable[Any],
        devices: Iterable[torch.device | str | int],
        ready: Iterable[Event | None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._parts = tuple(parts)
        self.devices = tuple(normalised(device) for device in devices)
        self.ready = (None,) * len(self._parts) if ready is None else tuple(ready)
        self.rows = None if rows is None else tuple(rows)

    def wait(self, part: int) -> Any:
        """Make the calling thread's current stream wait for a part, and return the part."""
        event = self.ready[part]
        if event is not None:
            event.wait()
        return self._parts[part]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            rows = None if self.rows is None else self.rows[index]
            return Scattered(self._parts[index], self.devices[index], self.ready[index], rows)
        return self._parts[index]

    def __repr__(self) -> str:
        return f"<Scattered: {len(self)} parts on {', '.join(map(str, self.devices))}>"
