"""The memory of a CPU tensor as a numpy array, without a copy where that is possible.

Why it exists: a Group takes numpy arrays; torch has dtypes and devices that numpy does not have.
It must never know: Groups, for what an array is used.
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
# For dtypes that ml_dtypes adds to numpy: a torch dtype of the same size that numpy has.
_SAME_BITS = {torch.bfloat16: torch.int16}
_NUMPY_HAS = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with the same elements, without a graph; it shares the memory if that is
    contiguous already. TypeError: it is not dense, or not on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"backend 'hoplite' takes dense tensors of the CPU, not one of {tensor.dtype} on "
            f"{tensor.device} with layout {tensor.layout}; t.cpu() and t.to_dense() make one"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor, *, reduced: bool = False) -> Array:
    """The elements of a `plain` tensor as an array of one dimension, in the same memory. `reduced`:
    they will be reduced, so the dtype counts; otherwise a dtype that numpy lacks becomes bytes."""
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
    """Returns a `plain` tensor to write a result into, and a function that then copies it into
    `tensor`, if they do not share memory."""
    one = plain(tensor)
    if one.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return one, lambda: None
    target = tensor.detach()
    return one, lambda: target.copy_(one)
