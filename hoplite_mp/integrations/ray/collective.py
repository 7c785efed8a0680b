"""The functions of ray.util.collective, implemented with a Group: only the import line changes.

    from hoplite_mp.integrations.ray import collective as col     # was: from ray.util import ...

    @ray.remote
    class Worker:
        def __init__(self, rank):
            col.init_collective_group(4, rank, group_name="training")
        def step(self, grad):
            col.allreduce(grad, "training")   # in place, for numpy arrays and torch CPU tensors

Importing this module also registers the backend "HOPLITE" with Ray, for programs that name it in
`ray.util.collective.init_collective_group(..., backend="HOPLITE")`. Import this module in the
driver and in the actors.

Ray's groups use Gloo or NCCL, and fail when one rank dies. In the groups of this module the
survivors complete the call and continue. An actor that Ray has restarted rejoins when it calls
`init_collective_group` with the same name and rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ray.util import collective as rays
from ray.util.collective import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    destroy_collective_group,
    get_collective_group_size,
    get_rank,
    is_group_initialized,
    recv,
    reduce,
    reducescatter,
    send,
)
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

from hoplite_mp._serialize.tensors import memory_of
from hoplite_mp.integrations.ray._reducing import cluster_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._group.group import Group

__all__ = [
    "HopliteGroup",
    "ReduceOp",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "create_collective_group",
    "destroy_collective_group",
    "get_collective_group_size",
    "get_rank",
    "init_collective_group",
    "is_group_initialized",
    "recv",
    "reduce",
    "reducescatter",
    "send",
]

BACKEND = "HOPLITE"
Array = np.ndarray[Any, np.dtype[Any]]
_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


def init_collective_group(
    world_size: int,
    rank: int,
    backend: Any = BACKEND,
    group_name: str = "default",
    gloo_timeout: int = 30_000,
) -> None:
    """Makes this actor, or task, a member of the group with the given rank.

    Returns immediately. The first call waits until all `world_size` ranks have joined; after
    Config.group_wait_s it raises an error with the number of ranks that have joined. backend and
    gloo_timeout are accepted for compatibility, and have no effect. Raises ClosedError if the
    driver has not called `hoplite_mp.integrations.ray.init()`.
    """
    rays.init_collective_group(world_size, rank, BACKEND, group_name)


def create_collective_group(
    actors: Sequence[Any],
    world_size: int,
    ranks: Sequence[int],
    backend: Any = BACKEND,
    group_name: str = "default",
    gloo_timeout: int = 30_000,
) -> None:
    """Declares the actors of a group, and their ranks, in a driver. Each actor becomes a member
    when it makes its first call. backend and gloo_timeout: as for `init_collective_group`."""
    rays.create_collective_group(list(actors), world_size, list(ranks), BACKEND, group_name)


class HopliteGroup(BaseGroup):  # type: ignore[misc, unused-ignore]
    """One rank of a group. Ray's functions call its methods."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        cluster = cluster_here()
        self._group: Group = cluster.group(f"ray/{group_name}", world_size, rank)

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    @property
    def group(self) -> Group:
        """The underlying Group; its `alive`, `contributors` and `calls` show deaths."""
        return self._group

    def destroy_group(self) -> None:
        self._group.close()

    # -- calls: each tensor is in a list of length one, because Ray supports several GPUs ---------

    def allreduce(self, tensors: list[Any], allreduce_options: Any = None) -> None:
        x = _array_of(tensors[0])
        _fill(x, self._group.allreduce(x, _op(allreduce_options)))

    def barrier(self, barrier_options: Any = None) -> None:
        self._group.barrier()

    def reduce(self, tensors: list[Any], reduce_options: Any = None) -> None:
        x = _array_of(tensors[0])
        root = _of(reduce_options, "root_rank")
        result = self._group.reduce(x, _op(reduce_options), root)
        if result is not None:
            _fill(x, result)

    def broadcast(self, tensors: list[Any], broadcast_options: Any = None) -> None:
        x = _array_of(tensors[0])
        root = _of(broadcast_options, "root_rank")
        if root == self._group.rank:
            self._group.broadcast(x, root)
        else:
            _fill(x, self._group.broadcast(root=root))

    def allgather(
        self, tensor_lists: list[list[Any]], tensors: list[Any], allgather_options: Any = None
    ) -> None:
        """Fills one tensor for each rank. The tensors for dead ranks remain unchanged."""
        parts = self._group.allgather(_array_of(tensors[0]))
        for tensor, part in zip(tensor_lists[0], parts, strict=True):
            if part is not None:
                _fill(_array_of(tensor), part)

    def reducescatter(
        self, tensors: list[Any], tensor_lists: list[list[Any]], reducescatter_options: Any = None
    ) -> None:
        x = _array_of(tensors[0])
        whole = np.stack([_array_of(one) for one in tensor_lists[0]])
        if whole.shape[1:] != x.shape:
            raise ValueError(
                f"reducescatter: the tensors in the list have the shape {whole.shape[1:]}, but the "
                f"result's tensor has the shape {x.shape}; they must be equal"
            )
        _fill(x, self._group.reduce_scatter(whole, _op(reducescatter_options))[0])

    def send(self, tensors: list[Any], send_options: Any) -> None:
        self._group.send(_array_of(tensors[0]), send_options.dst_rank)

    def recv(self, tensors: list[Any], recv_options: Any) -> None:
        _fill(_array_of(tensors[0]), self._group.recv(recv_options.src_rank))


def _op(options: Any) -> str:
    return _OPS[ReduceOp.SUM if options is None else options.reduceOp]


def _of(options: Any, name: str) -> int:
    return 0 if options is None else int(getattr(options, name))


def _array_of(tensor: Any) -> Array:
    """An array that shares the tensor's memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    device = getattr(tensor, "device", None)
    if getattr(device, "type", "") != "cpu":
        raise TypeError(
            f"a {type(tensor).__name__} on {device}: hoplite_mp groups accept numpy arrays and "
            "torch tensors on the CPU; copy it there with .cpu()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            "the tensor is a view that conjugates or negates another tensor's memory: pass "
            "x.resolve_conj().resolve_neg()"
        )
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return memory_of(tensor.detach(), tuple(tensor.shape), dtype, strides)


def _fill(x: Array, result: Any) -> None:
    """Writes the result into x. Raises ValueError if the result has another shape or x is
    read-only, and TypeError if the result has another dtype. x is checked only after the call, when
    this rank has contributed, so that the other ranks do not wait for this rank."""
    if not x.flags.writeable:
        raise ValueError(
            "the array for the result is read-only, like all arrays that Ray passes to "
            "tasks and actors: pass a copy, x.copy()"
        )
    found = np.asarray(result)
    if found.shape != x.shape:
        raise ValueError(f"a value of shape {found.shape} arrived where {x.shape} was expected")
    np.copyto(x, found, casting="no")


register_collective_backend(BACKEND, HopliteGroup)
