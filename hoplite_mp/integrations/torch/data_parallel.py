"""torch's DistributedDataParallel for ranks that may die, and come back.

Why it exists: torch's world has a fixed size, and a rank that dies ends all. Here torch's class
gathers gradients in buckets while the backward pass runs, as always, but sees a process group of
one; the buckets are averaged over the living ranks by the calls of a Group.
It must never know: how members of a Group are found, how a call survives a death.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

# torch's own class does this in its constructor, where it takes 1.5 s in a new process: while a
# rank that has come back to a Group imports it there, the others wait for that rank's first call.
import torch._dynamo
from torch.futures import Future
from torch.nn import parallel

from hoplite_mp.integrations.torch.alone import Alone
from hoplite_mp.integrations.torch.rejoining import Meeting
from hoplite_mp.integrations.torch.tensors import flat
from hoplite_mp.integrations.torch.work import Caller, Work

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from hoplite_mp.group import Group

__all__ = ["DistributedDataParallel"]

OURS = ("process_group", "init_sync", "broadcast_buffers", "find_unused_parameters")
NOT_HERE = (
    "static_graph",
    "device_ids",
    "output_device",
    "device_mesh",
    "delay_all_reduce_named_params",
)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """A module whose gradients are averaged over the living ranks of a Group.

    `group`: a Group of all ranks, made for this alone; only this object makes calls of it.
    `state`: what else a rank that comes back has to take over from the others, by name: objects
    with `state_dict()` and `load_state_dict()`, such as optimizers and schedulers.
    `forward_sync_buffers`: before each step all take the buffers of the lowest living rank.
    Further arguments as of torch's class, where they make sense; buckets keep their first order.

    When the constructor returns, this rank has the parameters, buffers, state and `step_number` of
    the others: at the beginning those of rank 0, later those of the survivors, from whom it takes
    them between two steps. Each rank then does the same: one forward pass in training mode and one
    backward pass for a step (with `no_sync()` before, several). A rank that dies is left out of the
    averages from then on, so `step_number` and the gradients are the same on all survivors.
    PeerLostError: this rank has come back, but the others have finished.
    TypeError: a parameter is not on the CPU; an object of `state` has not these methods.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        group: Group,
        state: Mapping[str, Any] | None = None,
        forward_sync_buffers: bool = True,
        **kwargs: Any,
    ) -> None:
        _check(module, state or {}, kwargs)
        traffic = _Traffic(group, _State(module, state or {}))
        super().__init__(
            module,
            process_group=Alone(traffic.used),
            init_sync=False,
            forward_sync_buffers=False,
            # Else torch sorts the buckets anew after the first step of each rank, and one that has
            # come back would have others than the survivors.
            find_unused_parameters=True,
            **kwargs,
        )
        # Only now, because from here on all wait for each other.
        traffic.begin_with_the_others()
        self._traffic = traffic
        self._syncs_buffers = forward_sync_buffers and bool(list(module.buffers()))
        # torch reads the annotations of a hook, and knows them as objects only; a lambda has none.
        self.register_comm_hook(traffic, lambda to, bucket: to.average(bucket))
        weakref.finalize(self, traffic.caller.end, 0)

    @property
    def step_number(self) -> int:
        """How many steps all have made, which are backward passes with averaged gradients."""
        return self._traffic.state.step

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose gradients, or buffers, went into the last call, sorted."""
        return self._traffic.meeting.contributors

    @property
    def peers(self) -> Group:
        """The Group of those who make the present step, for calls of one's own that all of them
        make between a forward pass and the backward pass, or after it. It may be another one
        after the next forward pass."""
        return self._traffic.meeting.peers

    @property
    def _distributed_rank(self) -> int:
        return self._traffic.meeting.group.rank

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._traffic.begin(list(self.module.buffers()) if self._syncs_buffers else [])
        return super().forward(*inputs, **kwargs)


class _State:
    """What a newcomer takes over."""

    def __init__(self, module: torch.nn.Module, others: Mapping[str, Any]) -> None:
        self.module = module
        self.others = dict(others)
        self.step = 0

    def give(self) -> dict[str, Any]:
        others = {name: one.state_dict() for name, one in self.others.items()}
        tensors = {name: tensor.detach() for name, tensor in self._tensors().items()}
        return {"tensors": tensors, "step": self.step, "others": others}

    def take(self, given: dict[str, Any]) -> None:
        own = self._tensors()
        theirs = given["tensors"]
        _compare(
            {name: (tuple(one.shape), one.dtype) for name, one in own.items()},
            {name: (tuple(one.shape), one.dtype) for name, one in theirs.items()},
        )
        _compare(dict.fromkeys(self.others), dict.fromkeys(given["others"]))
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(theirs[name])
        for name, one in self.others.items():
            one.load_state_dict(given["others"][name])
        self.step = given["step"]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}


class _Traffic:
    """What goes from rank to rank. The backward pass hands buckets over to the thread of `caller`,
    which makes the calls in their order while the pass goes on."""

    def __init__(self, group: Group, state: _State) -> None:
        self.state = state
        self.meeting = Meeting(group, state.give, state.take)
        self._has_met = False
        self.caller: Caller

    def begin_with_the_others(self) -> None:
        """What comes before the first step: this rank has their state then, and makes calls."""
        self.meeting.meet()
        self._has_met = True
        self.caller = Caller(f"hoplite_mp {self.meeting.group.name}", self.meeting.close)

    def begin(self, buffers: list[torch.Tensor]) -> None:
        """What comes before a step."""
        if not self._has_met:
            self.meeting.meet()
        self._has_met = False
        if buffers:
            given = self.meeting.from_one([buffer.detach() for buffer in buffers])
            for buffer, one in zip(buffers, given, strict=True):
                buffer.detach().copy_(one)

    def average(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """torch's communication hook: begins the average of a bucket in place."""
        tensor, last = bucket.buffer(), bucket.is_last()
        array, peers = flat(tensor, reduced=True), self.meeting.peers
        future: Future[torch.Tensor] = Future()

        def call() -> None:
            try:
                peers.allreduce(array, "mean", out=array)
            except BaseException as error:
                future.set_exception(error)
                raise
            self.state.step += last
            future.set_result(tensor)

        self.caller.make([tensor], call)
        return future

    def used(self, tensor: torch.Tensor) -> Work:
        """How many ranks have used each parameter: of those that none has used no gradient is
        made."""
        array, peers = flat(tensor, reduced=True), self.meeting.peers
        return self.caller.make([tensor], lambda: _none(peers.allreduce(array, out=array)))


def _none(_: Any) -> None:
    return None


def _check(module: torch.nn.Module, state: Mapping[str, Any], kwargs: dict[str, Any]) -> None:
    for name in (*OURS, *NOT_HERE):
        if kwargs.get(name) is not None:
            why = "is set by this class" if name in OURS else "has no meaning for this class"
            raise ValueError(f"{name}={kwargs[name]!r}: {why}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise TypeError(f"{name} is on {tensor.device}: the module must be on the CPU")
    for name, one in state.items():
        if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise TypeError(
                f"state[{name!r}] is a {type(one).__qualname__}, which has no state_dict() and "
                "load_state_dict()"
            )


def _compare(own: dict[str, Any], theirs: dict[str, Any]) -> None:
    if own != theirs:
        names = sorted(
            name for name in own.keys() | theirs.keys() if own.get(name, 0) != theirs.get(name, 0)
        )
        raise ValueError(
            f"the state of the other ranks is of another program: {', '.join(names[:5])} differ "
            f"({len(names)} in all)"
        )
