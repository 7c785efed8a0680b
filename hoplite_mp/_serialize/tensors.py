"""Sends the memory of torch tensors as out-of-band buffers, and reads it in place.

Plain pickle writes a tensor's elements into the stream. torch has no read-only tensors, and warns
about read-only memory. So a large tensor that is read from the store uses the store's pages, and
gets a private copy of each page when it first writes to the page. A tensor that fills its storage
is sent as this storage, so tensors that share a storage still share it after the transfer. A
tensor that is part of a larger storage is copied and sent alone.
"""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._serialize.layout import INBAND_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._serialize.code import Reduced

# Memory of fewer bytes is copied, because a private mapping costs 3 us, and the kernel allows a
# process only 65 530 mappings.
PRIVATE_BYTES_MIN = 64 << 10


class _Memory:
    """The memory of a tensor or a storage, as described by numpy's array interface."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(
        self,
        owner: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        strides: tuple[int, ...] | None,
    ) -> None:
        self.owner = owner  # keeps the memory alive as long as the array exists
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "strides": strides,
            "data": (owner.data_ptr(), False),
        }


def memory_of(
    owner: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None = None,
) -> np.ndarray[Any, np.dtype[Any]]:
    """An array over the memory of a tensor or a storage. `strides`: in bytes; None if the memory
    is contiguous. (`Tensor.numpy()` would make the storage permanently non-resizable.)"""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.asarray(_Memory(owner, shape, dtype, strides))


def handler_of(cls: type) -> Callable[[Any, Any], Reduced] | None:
    """The function that reduces instances of a torch class; None for other classes."""
    torch: Any = sys.modules.get("torch")
    storage: Any = sys.modules.get("torch.storage")
    if torch is None or storage is None or not hasattr(torch, "Tensor"):  # or it is being imported
        return None
    if issubclass(cls, torch.Tensor):
        return _reduce_tensor
    if issubclass(cls, storage.TypedStorage):
        return _reduce_typed
    return _reduce_storage if issubclass(cls, torch.UntypedStorage) else None


def _reduce_tensor(pickler: Any, tensor: Any) -> Reduced:
    torch: Any = sys.modules["torch"]
    plain = type(tensor) is torch.Tensor and not tensor.__dict__ and not tensor._backward_hooks
    if not plain or not _is_in_memory(tensor):
        return NotImplemented  # torch's own reduction is used, usually to a tensor or a storage
    requires_grad = tensor.requires_grad
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return load_tensor, (tensor.untyped_storage(), tensor.dtype, *place, requires_grad)


def _is_in_memory(tensor: Any) -> bool:
    strided = tensor.layout is sys.modules["torch"].strided
    in_memory = strided and tensor.device.type == "cpu" and not tensor.is_quantized
    return bool(in_memory and not any(getattr(tensor, "names", ())))


def _reduce_typed(pickler: Any, typed: Any) -> Reduced:
    if typed._untyped_storage.device.type != "cpu":
        return NotImplemented
    return load_typed, (typed._untyped_storage, typed.dtype)


def _reduce_storage(pickler: Any, storage: Any) -> Reduced:
    if storage.device.type != "cpu":
        return NotImplemented
    elements = memory_of(storage, (storage.nbytes(),), np.dtype(np.uint8))
    if elements.nbytes <= INBAND_BYTES_MAX:
        return load_storage, (elements.tobytes(),)
    return load_storage, (pickle.PickleBuffer(elements.data),)


# -- reading -------------------------------------------------------------------------------------


def load_tensor(
    storage: Any, dtype: Any, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> Any:
    """Used in streams: makes a tensor over a storage."""
    import torch

    tensor: Any = torch.empty(0, dtype=dtype)
    tensor.set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def load_typed(storage: Any, dtype: Any) -> Any:
    """Used in streams: makes a typed storage over an untyped one."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def load_storage(data: Any) -> Any:
    """Used in streams: makes a torch storage over `data`. The storage is always writable."""
    import torch

    nbytes = len(data)
    if not nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(_writable(data), dtype=torch.uint8).untyped_storage()


def _writable(data: Any) -> Any:
    if isinstance(data, bytes):
        return bytearray(data)
    view = memoryview(data)
    if not view.readonly:
        return data
    # An exporter of the store's memory can map it a second time, as a private mapping.
    private = getattr(view.obj, "private", None)
    if private is not None and view.nbytes >= PRIVATE_BYTES_MIN:
        found = private(view)
        if found is not None:
            return found
    copy = np.empty(view.nbytes, np.uint8)
    copy[:] = np.frombuffer(view, np.uint8)
    return copy
