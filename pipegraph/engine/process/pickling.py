"""Pickles trees of arrays and tensors for other processes: these as their bytes, large buffers beside the pickle."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipegraph.engine.remote.by_value import ByValuePickler
from pipegraph.tree import bytes_of

APART = 1 << 12
"""Buffers from this many bytes on are kept out of the pickle: below, a copy costs less than the bookkeeping."""

SMALL_PART = 16
"""A buffer of less than 1/16 of its message is copied out of the segment."""

Take = Callable[[pickle.PickleBuffer], bool]
"""Is given the buffers of what is pickled; False for one that is kept out of the pickle."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = {value: name for name, value in _DTYPES.items()}  # pickling a name takes a tenth of a dtype's time


def tensor_of(
    buffer: object, name: str, shape: tuple[int, ...], grad: bool, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor over received bytes, which lie in the order of its strides; None: row by row."""
    dtype, count = _DTYPES[name], math.prod(shape)
    made = torch.frombuffer(buffer, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
    made = made.view(shape) if strides is None else made.as_strided(shape, strides)
    return made.requires_grad_() if grad else made


def light_below(sizes: Sequence[int]) -> int:
    """The size below which a message's buffers are copied out of the segment, so that a label that is kept does not
    keep the message's images alive."""
    light = sum(sizes) // SMALL_PART
    # Many of a size: nearly all would be copied.
    return 0 if sum([nbytes for nbytes in sizes if nbytes < light]) > light else light


def _plain(tensor: torch.Tensor) -> bool:
    """Whether bytes, dtype and shape describe a tensor completely; torch itself pickles the others."""
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return dense and tensor.device.type == "cpu"


def _in_memory(tensor: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """A tensor with its dimensions in the order in which they lie in memory, and its strides, if they are not those of
    its shape; the tensor itself where elements are left out or repeated."""
    if (
        tensor.is_contiguous()
    ):  # whatever the strides of dimensions of size 1, by which torch tells channels_last
        return tensor, tensor.stride() if 1 in shape else None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda each: (strides[each], shape[each]), reverse=True)
    block = tensor.detach().permute(order)
    return (block, strides) if block.is_contiguous() else (tensor, None)


def _view(buffer: Any, kind: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    view = memoryview(buffer).cast("B")
    if (kind, shape) != ("B", (view.nbytes,)):
        view = view.cast(kind, shape)  # type: ignore[call-overload]
    return view.toreadonly() if readonly else view


def set_apart() -> tuple[Take, list[memoryview]]:
    """A ``buffer_callback`` for a pickler that keeps large buffers out of the stream, and the list that gets them."""
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < APART:
            return True
        buffers.append(raw)
        return False

    return take, buffers


class TreePickler(ByValuePickler):
    """A pickler that writes plain CPU tensors as their bytes."""

    def __init__(self, file: object, take: Take, back: bool = False) -> None:
        super().__init__(file, back, buffer_callback=take)

    def reducer_override(self, value: object) -> object:
        if value.__class__ is torch.Tensor and _plain(value):
            shape = tuple(value.shape)
            block, strides = _in_memory(value, shape)
            raw: Any = bytes_of(block).numpy()
            grad = value.requires_grad and value.is_leaf
            about = (pickle.PickleBuffer(raw), _NAMES[value.dtype], shape, grad)
            return tensor_of, about if strides is None else (*about, strides)
        if value.__class__ is memoryview:
            octets = value.cast("B") if value.c_contiguous else memoryview(bytearray(value.tobytes()))
            return _view, (pickle.PickleBuffer(octets), value.format, value.shape, value.readonly)
        return super().reducer_override(value)
