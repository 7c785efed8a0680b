"""torch's DistributedDataParallel for ranks that may die and rejoin.

In torch, the number of ranks is fixed, and the death of one rank stops the training. In this
module, torch's class still gathers gradients in buckets during the backward pass, but its process
group has only one rank. Group calls average the buckets over the living ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

# torch's class imports this module in its constructor, which takes 1.5 s in a new process. By then
# a rejoining rank has joined its Group, so the other ranks would wait for its first call.
import torch._dynamo
import torch.distributed as dist
from torch.futures import Future
from torch.nn import parallel

from hoplite_mp._group.call_protocol import split_name
from hoplite_mp.errors import PeerLostError
from hoplite_mp.integrations.torch._process_group import flat
from hoplite_mp.integrations.torch._work import Work, WorkThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp._group.group import Group


__all__ = ["DistributedDataParallel", "SoloProcessGroup", "StepMembership"]

# A training run uses two Groups, because ranks die and rejoin.
#
# A new rank may join a Group at any call. But a step makes many calls of different shapes, and a
# new rank must not join in the middle of a step. Therefore ranks join a first Group (the
# *meeting*), which makes the same single call before each step. The ranks in this call form a
# second Group, the *peers*, which makes the calls of the steps, and which no rank joins later. The
# peers continue without ranks that die. When a new rank has joined the meeting, a new Group of
# peers is formed, and the new rank gets the state from a rank that has it.


class StepMembership:
    """One rank's membership in both Groups. `give` returns this rank's state; `take` replaces the
    state with another rank's."""

    def __init__(self, group: Group, give: Callable[[], Any], take: Callable[[Any], None]) -> None:
        if group.strict:
            raise ValueError(
                f"group {group.name!r} has strict=True: the calls of its survivors fail"
            )
        self.group = group
        self._give = give
        self._take = take
        self._peers: Group | None = None
        self._ranks: tuple[int, ...] = ()  # the ranks of the peers in `group`
        self._formed_at: int | None = None  # the call of `group` that formed the peers

    @property
    def peers(self) -> Group:
        """The Group of the ranks that make the current step."""
        if self._peers is None:
            raise PeerLostError(f"group {self.group.name!r}: no peers have met yet")
        return self._peers

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks that took part in the peers' last call."""
        return tuple(self._ranks[place] for place in self.peers.contributors)

    def meet(self) -> None:
        """Forms the peers. Every rank calls this before each step; a new rank calls it before any
        other method.

        Afterwards, all `peers` have the same state. Raises PeerLostError if the ranks that had a
        state have left or died, and this rank has none.
        """
        while not self._met():
            pass

    def _met(self) -> bool:
        group = self.group
        answers = group.allgather((self._formed_at, group._member.identity))
        assert group.calls is not None, "the meeting has just made a call"
        call = group.calls - 1
        here = {rank: one for rank, one in enumerate(answers) if one is not None}
        if self._formed_at is not None and all(at == self._formed_at for at, _ in here.values()):
            return True
        givers = [rank for rank, (at, _) in here.items() if at is not None]
        if not givers:
            if call:
                raise PeerLostError(
                    f"group {group.name!r}: the ranks that had a state have left or died"
                )
            givers = list(here)  # the training begins, and any rank may give its state
        self._form(call, {rank: identity for rank, (_, identity) in here.items()})
        return self._hand_over(call, givers)

    def _form(self, call: int, members: dict[int, Any]) -> None:
        old, self._peers = self._peers, None
        peers = list(members.items())
        name = split_name(self.group.name, self.group._member.generation, call, 0, peers)
        self._peers = self.group._of_peers(name, peers)
        self._ranks = tuple(members)
        if old is not None:
            old.close()

    def _hand_over(self, call: int, givers: list[int]) -> bool:
        """Broadcasts the state of the first living rank in `givers`. Returns False if none of them
        is alive; the result is the same on all ranks."""
        peers = self.peers
        for giver in givers:
            gives = giver == self.group.rank
            try:
                state = peers.broadcast(
                    self._give() if gives else None, root=self._ranks.index(giver)
                )
            except PeerLostError:
                continue
            if self._formed_at is None and not gives:
                self._take(state)
            self._formed_at = call
            return True
        return False

    def from_one(self, value: Any) -> Any:
        """Returns, on all peers, the value of the lowest living peer."""
        peers = self.peers
        for root in range(peers.size):
            try:
                return peers.broadcast(value, root=root)
            except PeerLostError:
                continue
        raise PeerLostError(f"group {self.group.name!r}: no rank is left")

    def close(self) -> None:
        """Leaves the peers. `group` stays open; the code that made it closes it."""
        if self._peers is not None:
            self._peers.close()


Tensors = list[torch.Tensor]


class SoloProcessGroup(dist.ProcessGroup):
    """The process group of size one that torch's DistributedDataParallel uses.

    torch's class makes calls of its own (at its start, and for buffers), which ranks that join
    later would miss. In a process group of one rank these calls have no effect. Only one kind of
    call is passed on: the sum over ranks of the used parameters, because all ranks must agree on
    which parameters have a gradient. `used` sums a tensor over all ranks, in place."""

    def __init__(self, used: Callable[[torch.Tensor], Work]) -> None:
        super().__init__(0, 1)
        self._used = used

    def getBackendName(self) -> str:
        return "hoplite_alone"

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._used(tensors[0])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Work:
        return _done([])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        outputs[0][0].detach().copy_(inputs[0].detach())
        return _done(outputs[0])


def _done(tensors: Tensors) -> Work:
    work = Work(tensors)
    work.finish(lambda: None)
    return work


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

    `group`: a Group of all ranks, used only by this object. `state`: further objects, by name,
    whose state a rejoining rank takes over from the other ranks. They have `state_dict()` and
    `load_state_dict()`, like optimizers and schedulers. `forward_sync_buffers`: whether all ranks
    copy the buffers of the lowest living rank before each step. Further arguments are as for
    torch's class, if they have a meaning here. Buckets keep their initial order.

    When the constructor returns, this rank has the parameters, buffers, state and `step_number` of
    the other ranks. At the beginning rank 0 provides this data; later a survivor provides it
    between two steps. Each rank then makes the same passes: one forward pass in training mode and
    one backward pass for each step (several with `no_sync()` before them). A rank that dies is left
    out of the averages from then on, so `step_number` and the gradients are the same on all
    survivors. Raises PeerLostError if this rank has rejoined, but the other ranks have finished,
    and TypeError if a parameter is not on the CPU, or an object in `state` does not have the two
    methods."""

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
            process_group=SoloProcessGroup(traffic.used),
            init_sync=False,
            forward_sync_buffers=False,
            # Otherwise torch would rebuild the buckets after each rank's first step, and a
            # rejoining rank's buckets would differ from the survivors' buckets.
            find_unused_parameters=True,
            **kwargs,
        )
        # Called last, because from now on the ranks wait for each other.
        traffic.join_others()
        self._traffic = traffic
        self._syncs_buffers = forward_sync_buffers and bool(list(module.buffers()))
        # torch checks the annotations of a hook, and does not understand string annotations. A
        # lambda has no annotations.
        self.register_comm_hook(traffic, lambda to, bucket: to.average(bucket))
        weakref.finalize(self, traffic.caller.end, 0)

    @property
    def step_number(self) -> int:
        """The number of steps so far, that is, of backward passes with averaged gradients."""
        return self._traffic.state.step

    @property
    def contributors(self) -> tuple[int, ...]:
        """The sorted ranks whose gradients or buffers were in the last call."""
        return self._traffic.meeting.contributors

    @property
    def peers(self) -> Group:
        """The Group of the ranks that make the current step, for the program's own calls. All
        ranks must make these calls between a forward pass and the backward pass, or after the
        backward pass. The next forward pass may replace the Group."""
        return self._traffic.meeting.peers

    @property
    def _distributed_rank(self) -> int:
        return self._traffic.meeting.group.rank

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._traffic.begin(list(self.module.buffers()) if self._syncs_buffers else [])
        return super().forward(*inputs, **kwargs)


class _State:
    """The state that a new rank gets from another rank."""

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
    """The calls between ranks. The backward pass passes buckets to the thread of `caller`, which
    makes the calls in order during the pass."""

    def __init__(self, group: Group, state: _State) -> None:
        self.state = state
        self.meeting = StepMembership(group, state.give, state.take)
        self._has_met = False
        self._failed = False  # whether a bucket of the current backward pass has failed
        self.caller: WorkThread

    def join_others(self) -> None:
        """Takes over the state of the other ranks before the first step, and starts `caller`."""
        self.meeting.meet()
        self._has_met = True
        self.caller = WorkThread(f"hoplite_mp {self.meeting.group.name}", self.meeting.close)

    def begin(self, buffers: list[torch.Tensor]) -> None:
        """Meets the other ranks before a step, and copies the buffers of one of them."""
        if not self._has_met:
            self.meeting.meet()
        self._has_met = self._failed = False
        if buffers:
            given = self.meeting.from_one([buffer.detach() for buffer in buffers])
            for buffer, one in zip(buffers, given, strict=True):
                buffer.detach().copy_(one)

    def average(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """The communication hook for torch, which begins to average a bucket in place."""
        tensor, last = bucket.buffer(), bucket.is_last()
        array, peers = flat(tensor, reduced=True), self.meeting.peers
        future: Future[torch.Tensor] = Future()

        def call() -> None:
            try:
                peers.allreduce(array, "mean", out=array)
            except BaseException as error:
                self._failed = True
                future.set_exception(error)
                raise
            self.state.step += last and not self._failed
            future.set_result(tensor)

        self.caller.make([tensor], call)
        return future

    def used(self, tensor: torch.Tensor) -> Work:
        """Counts, for each parameter, the ranks that have used it. torch makes no gradient for a
        parameter that no rank has used."""
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
            f"the state of the other ranks belongs to another program: {', '.join(names[:5])} "
            f"differ ({len(names)} in all)"
        )
