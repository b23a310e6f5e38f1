"""The bytes of tensors in host memory."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The content of a strided CPU tensor as uint8 (nbytes,): a view where the tensor is contiguous, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous whatever its strides say, and only those of 1 can be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
