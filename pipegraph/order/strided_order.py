"""``StridedOrder``: torch's ``DistributedSampler``, index for index."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, final

import numpy as np

from pipegraph.errors import GraphError
from pipegraph.order.base import JsonDict, Order, Tail, check_flags
from pipegraph.order.layout import Int64Array, LayoutLike, total_samples
from pipegraph.order.permutation import BoundedMemo

if TYPE_CHECKING:
    import numpy.typing as npt

# Eight ImageNet-sized permutations (4 bytes * 1.28 M) and some: enough for
# several loaders in one process, little beside the data they feed.
_permutations: BoundedMemo[npt.NDArray[np.integer]] = BoundedMemo(64 << 20, lambda array: array.nbytes)


@final
@dataclasses.dataclass(frozen=True)
class StridedOrder(Order):
    """``torch.utils.data.DistributedSampler``: rank r takes positions r, r+W, r+2W ...

    The stream is ``torch.randperm`` with a generator seeded ``seed + epoch`` (so
    (seed 0, epoch 1) equals (1, 0), as in torch), or the plain range. It holds
    4 bytes per sample (8 from 2**31 samples on) for the epochs in use, and draws them in minutes where there are
    hundreds of millions: ``BlockOrder`` shuffles without a table.

    Args:
        shuffle: permute the samples; else they come in their own order.
        drop_last: leave out the last samples that are not enough for a step on every
            rank; else the stream is padded from its start, repeatedly if needed.
    """

    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "shuffle", "drop_last")

    def config(self) -> JsonDict:
        return {"order": "StridedOrder"} | dataclasses.asdict(self)

    @property
    def tail(self) -> Tail:
        return "drop" if self.drop_last else "pad"

    def draw(self, layout: LayoutLike, positions: Int64Array, seed: int, epoch: int) -> Int64Array:
        total = total_samples(layout)
        positions = positions % total
        if not self.shuffle:
            return positions
        if seed + epoch >= 2**64:
            raise GraphError(
                f"{self!r}: seed + epoch must be < 2**64, as torch's generator takes no more, "
                f"got {seed} + {epoch}. Choose a smaller seed."
            )
        order = _permutations.get((total, seed + epoch), lambda: _randperm(total, seed + epoch))
        return order[positions].astype(np.int64, copy=False)


def _randperm(total: int, seed: int) -> npt.NDArray[np.integer]:
    import torch  # other orders do without

    generator = torch.Generator()
    generator.manual_seed(seed)
    order: Int64Array = torch.randperm(total, generator=generator).numpy()
    # Drawn as int64, for that is what torch's sampler draws; half the memory is enough to keep it.
    return order.astype(np.int32) if total < 2**31 else order
