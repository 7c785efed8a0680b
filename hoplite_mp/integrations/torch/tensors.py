"""The memory of a CPU tensor as a numpy array, without a copy where that is possible.

Why it exists: a Group knows numpy arrays; torch has dtypes and devices that numpy does not have.
It must never know: Groups, what an array is wanted for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Array", "filled", "flat", "plain"]

Array = np.ndarray[Any, np.dtype[Any]]
# Dtypes that numpy lacks and ml_dtypes has: the same bits under another name.
_SAME_BITS = {torch.bfloat16: torch.int16}
_NUMPY_HAS = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with these elements and without a graph: the same memory if it is
    contiguous already. TypeError: it is not dense, or not a CPU's."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"backend 'hoplite' takes dense tensors of the CPU, not one of {tensor.dtype} on "
            f"{tensor.device} with layout {tensor.layout}; t.cpu() and t.to_dense() make one"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor, *, reduced: bool = False) -> Array:
    """The elements of a `plain` tensor as an array of one dimension, the same memory. `reduced`:
    they are to be added up, so their dtype counts (else any dtype that numpy lacks is bytes)."""
    elements = tensor.view(-1)
    if tensor.dtype in _NUMPY_HAS:
        found: Array = elements.numpy()
        return found
    if not reduced:
        found = elements.view(torch.uint8).numpy()
        return found
    if tensor.dtype not in _SAME_BITS:
        raise TypeError(f"backend 'hoplite' cannot reduce tensors of {tensor.dtype}")
    bits: Array = elements.view(_SAME_BITS[tensor.dtype]).numpy()
    return bits.view(np.dtype(ml_dtypes.bfloat16))


def filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """A `plain` tensor whose memory takes a result, and what then brings it into `tensor`."""
    one = plain(tensor)
    if one.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return one, lambda: None
    target = tensor.detach()
    return one, lambda: target.copy_(one)
