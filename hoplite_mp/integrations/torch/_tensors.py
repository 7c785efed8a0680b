"""The memory of a CPU tensor as a numpy array, without a copy where that is possible.

A Group takes numpy arrays; torch has dtypes and devices that numpy does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from hoplite_mp._serialize.tensors import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Array", "filled", "flat", "plain"]

Array = np.ndarray[Any, np.dtype[Any]]
_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES = {getattr(torch, name): np.dtype(name) for name in _NAMES}
_BYTES, _BITS_16 = np.dtype(np.uint8), np.dtype(np.uint16)


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
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is not None:
        return memory_of(tensor, (tensor.numel(),), dtype)
    if not reduced:
        return memory_of(tensor, (tensor.numel() * tensor.element_size(),), _BYTES)
    if tensor.dtype is not torch.bfloat16:
        raise TypeError(f"backend 'hoplite' cannot reduce tensors of {tensor.dtype}")
    return memory_of(tensor, (tensor.numel(),), _BITS_16).view(ml_dtypes.bfloat16)


def filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """Returns a `plain` tensor to write a result into, and a function that then copies it into
    `tensor`, if they do not share memory."""
    one = plain(tensor)
    if one.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return one, lambda: None
    target = tensor.detach()
    return one, lambda: target.copy_(one)
