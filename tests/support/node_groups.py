"""A Group over several nodes in one process: the real planner's groups, the real node's calls.

What is decided while members leave, die and come depends on which message is faster. Here each pair
of nodes, and each node with the manager, has a queue of its own, and a seed says which one moves
next. Members, boards and bytes are the simplest that can be judged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._node.groups.group_calls import MultiHostCalls
from hoplite_mp._node.groups.group_decisions import is_repeated
from hoplite_mp._node.groups.repeated_plans import member_of
from hoplite_mp._node.objects.remote_objects import payload_layout
from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.link_speeds import BYTES_PER_S_DEFAULT, LinkSpeeds
from hoplite_mp._planner.program import participants
from hoplite_mp._protocol.group_calls import GroupPart, Piece
from hoplite_mp._protocol.local import GroupCall
from hoplite_mp._protocol.messages import (
    Distribute,
    GroupAdmitted,
    GroupClosed,
    GroupJoined,
    GroupJoinRequested,
    GroupLeft,
    GroupMembers,
    GroupRefused,
)
from hoplite_mp._serialize.contributions import TARGETED
from tests.support.node_ports import NoEngineCalls

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

MANAGER = -1
NAME = "g"
KINDS = (
    "allreduce", "reduce", "broadcast", "gather", "allgather", "alltoall", "barrier", "scatter",
    "scan",
)  # fmt: skip
LARGE = 1 << 20  # bytes of a part that does not travel in messages
# Of worlds in which the same large calls are made again and again: the nodes repeat their plans.
REPEATED_KINDS = (
    "allreduce", "allgather", "alltoall", "reduce", "broadcast", "scatter", "gather", "scan",
)  # fmt: skip


def share(call: int, rank: int, target: int = 0) -> np.ndarray[Any, Any]:
    """What a rank gives: a bit of its own, so that a sum says who is in it."""
    return np.array([call << 40 | target << 32 | 1 << rank], np.int64)


def bits(payload: bytes) -> int:
    """What a payload says."""
    return int(_serialize.decode(memoryview(payload), make_ref=lambda _: None)[0])  # type: ignore[arg-type, return-value]


def _shape(plan: Any) -> Any:
    """All of a plan but the names of objects."""
    fields = msgspec.structs.asdict(plan)
    return {name: fields[name] for name in fields if name not in ("objects", "object")}


@dataclass(eq=False)
class Member:
    """One process that is in the group, or wants to be."""

    node: int
    slot: int
    rank: int = -1
    call: int = -1  # the next one; -1: it does not know
    made: bool = False  # it waits for the result
    gone: bool = False
    wants: int = 0  # calls that it will still make


@dataclass
class GroupWorld:
    """All of it. `size`: of the group; `nodes`: how many."""

    random: random.Random
    size: int
    count: int
    large: bool
    repeats: int = 0  # so many different calls; 0: all differ
    # (generation, call, attempt) -> the shape of the plans by which nodes have begun
    shapes: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    repeated: int = 0  # calls that were committed by a repeated plan
    queues: dict[tuple[int, int], deque[Any]] = field(default_factory=dict)
    nodes: dict[int, OneNode] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    groups: GroupRegistry = field(default_factory=lambda: GroupRegistry(4, LinkSpeeds()))
    made: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # call -> ranks
    # (call, node of who read it) -> contributors, error
    read: dict[tuple[tuple[int, int], int], tuple[Any, ...]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # nodes
    slow: set[tuple[int, int]] = field(default_factory=set)  # connections
    slows: bool = False  # links become slow while bytes move
    early: bool = False  # large calls begin before all have called
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for number in range(self.count):
            self.nodes[number] = OneNode(self, number)
        ends = (MANAGER, *self.nodes)
        share = self.random.choice([0.0, 0.1, 0.3])
        self.slow = {(a, b) for a in ends for b in ends if self.random.random() < share}

    def kind(self, generation: int, call: int) -> tuple[str, int, bool]:
        """(kind, root, are parts large) of a call: everybody makes the same."""
        if (self.slows or self.early) and call % 2:
            return "allreduce", 0, True
        if self.repeats:
            at = generation + call % self.repeats
            # Now and then one has other bytes, which receivers of a broadcast cannot know.
            return REPEATED_KINDS[at % len(REPEATED_KINDS)], at % self.size, call % 7 != 5
        at = generation * 7919 + call * 31
        return KINDS[at % len(KINDS)], at // 7 % self.size, self.large and at % 3 == 0

    def say(self, source: int, target: int, message: Any) -> None:
        if target not in self.lost and source not in self.lost:
            self.queues.setdefault((source, target), deque()).append(message)

    def told(self, sends: list[tuple[int, Any]]) -> None:
        for node, message in sends:
            self.say(MANAGER, node, message)

    # -- what can happen -----------------------------------------------------------------------

    def come(self) -> None:
        node = self.random.choice(sorted(self.nodes))
        most = 12 if self.repeats else 4
        member = Member(node, 1 + len(self.members), wants=self.random.randint(1, most))
        self.members.append(member)
        self.nodes[node].clients.add(member.slot)
        ask = GroupJoinRequested(member.slot, node, member.slot, 0, NAME, self.size, None, 64)
        self.say(node, MANAGER, ask)

    def leave(self, member: Member, *, killed: bool) -> None:
        """Cleanly, or as a process that is killed."""
        member.gone = True
        node = self.nodes[member.node]
        if killed:
            node.clients.discard(member.slot)
            self.say(member.node, MANAGER, ("gone", member.node, member.slot))
        else:
            left = GroupLeft(NAME, node.generation, member.rank, member.node, member.slot, 0)
            self.say(member.node, MANAGER, left)

    def lose(self, number: int) -> None:
        """A host dies; of what it had sent an end is lost."""
        del self.nodes[number]
        for (source, target), queue in list(self.queues.items()):
            if source == number:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
                queue.append(("lost", number))  # a connection's end comes after what it brought
            elif target == number:
                queue.clear()
        if (number, MANAGER) not in self.queues:
            self.queues[number, MANAGER] = deque([("lost", number)])
        self.lost.add(number)
        for member in self.members:
            member.gone = member.gone or member.node == number

    def deliver(self, source: int, target: int) -> None:
        message = self.queues[source, target].popleft()
        if target == MANAGER:
            self._manage(message)
        elif isinstance(message, tuple):
            if message[0] == "lost" and source == MANAGER:
                self.nodes[target].by_number.pop(message[1], None)
        elif source == MANAGER:
            self.nodes[target].hear(message)
        else:
            self.nodes[target].calls.receive(source, message)

    def _manage(self, message: Any) -> None:
        match message:
            case GroupJoinRequested():
                self.told(self.groups.join(message))
            case GroupLeft():
                self.told(self.groups.leave(message))
            case GroupAdmitted():
                self.told(self.groups.admit(message))
            case ("gone", node, slot):
                self.told(self.groups.lose_client(node, slot, 0))
            case ("lost", node):
                for other in self.nodes:
                    self.say(MANAGER, other, message)
                self.told(self.groups.lose_node(node))

    # -- the judge -----------------------------------------------------------------------------

    def judge(self, generation: int, member: Member, message: Any, value: Any) -> None:
        """A member has read a result."""
        key = generation, message.call
        kind, root, _ = self.kind(*key)
        assert member.rank in message.ranks
        assert set(message.ranks) <= self.made[key], "who has not called is no contributor"
        seen = message.ranks, message.error
        if "was lost before it sent this host's result" in message.message:
            assert kind in ("gather", "alltoall", "reduce", "scatter")
            assert self.lost
            return
        assert self.read.setdefault((key, member.node), seen) == seen
        if message.error:
            assert message.error == "lost"
            assert kind in ("broadcast", "reduce", "gather", "scatter")
            assert root not in message.ranks
            return
        ranks = message.ranks
        if kind == "allreduce" or (kind == "reduce" and member.rank == root):
            assert value == sum(int(share(message.call, rank)[0]) for rank in ranks)
        elif kind == "broadcast":
            assert value == int(share(message.call, root)[0])
        elif kind == "scatter":
            at = member.rank
            assert value == {(root, at): int(share(message.call, root, at)[0])}
        elif kind in ("allgather", "scan") or (kind == "gather" and member.rank == root):
            assert value == {(rank, -1): int(share(message.call, rank)[0]) for rank in ranks}
        elif kind == "alltoall":
            at = member.rank
            want = {(rank, at): int(share(message.call, rank, at)[0]) for rank in ranks}
            assert value == want

    def agreed(self) -> int:
        """Whoever has read a call on a host that lives has read the same: how many calls."""
        found: dict[tuple[int, int], tuple[Any, ...]] = {}
        for (key, node), seen in self.read.items():
            if node not in self.lost:
                assert found.setdefault(key, seen) == seen, (key, seen, found[key])
        return len(found)


@dataclass
class CountedBytes:
    """See `LinkEstimator`. The rates of the links are not known."""

    moved: Callable[[], tuple[int, int]]
    rates = (0, 0)


class OneNode:
    """What `MultiHostCalls` needs of a node, its peers and its results."""

    def __init__(self, world: GroupWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.clients: set[int] = set()
        self.host_id = number
        # Nodes that are not made yet become members when they are.
        self.by_number = dict(world.nodes)
        for other in world.nodes.values():
            other.by_number[number] = self
        self.moving: list[tuple[Any, Callable[[str, str], None]]] = []
        self.moved: set[tuple[int, int]] = set()  # (call, attempt)
        self.begun: set[tuple[int, int, int]] = set()  # (generation, call, attempt)
        self.parts: dict[int, GroupCall] = {}
        self.generation = self.bytes = 0
        self.starts: dict[int, int] = {}
        self.values: dict[int, tuple[Any, dict[int, Any]]] = {}
        self.held: list[GroupCall] = []
        self.given: dict[int, list[int]] = {}
        self.gave: set[bytes] = set()  # names of large parts of members here
        self.link_estimator = CountedBytes(self.moved_bytes)
        self.streaming_sources: dict[bytes, Any] = {}
        self.loop = self.roster = self.client = self.plan_runner = self.board = self
        self.name = NAME
        self.calls = MultiHostCalls(self, self, self, NoEngineCalls())  # type: ignore[arg-type]

    # -- as a node -----------------------------------------------------------------------------

    def moved_bytes(self) -> tuple[int, int]:
        """So many bytes have been sent and received: anything."""
        self.bytes += self.world.random.randint(0, LARGE // 16) if self.world.slows else 0
        return self.bytes, self.bytes

    def now(self) -> float:
        world = self.world
        one_s = LARGE / BYTES_PER_S_DEFAULT
        world.seconds += one_s * world.random.choice([0.0, 0.1, 1.0]) if world.early else 0.0
        return world.seconds

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        self.moving.append((None, lambda failure, error: action()))

    def send_manager(self, message: Any) -> None:
        self.world.say(self.number, MANAGER, message)

    def send_peer(self, host_id: int, message: Any) -> None:
        self.world.say(self.number, host_id, message)

    def hear(self, message: Any) -> None:
        if isinstance(message, GroupMembers):
            if message.generation > self.generation:
                self.generation = message.generation
                self.starts = {}
            both = message.alive | message.joining
            self.starts = {rank: at for rank, at in self.starts.items() if both >> rank & 1}
            self.calls.changed(message, self)  # type: ignore[arg-type]
        elif isinstance(message, GroupClosed):
            self.calls.closed(message.generation)
        elif isinstance(message, GroupJoined):
            for member in self.world.members:
                if member.slot == message.request:
                    member.rank = message.rank
        elif isinstance(message, GroupRefused):
            for member in self.world.members:
                if member.slot == message.request:
                    member.gone = True

    # -- as a board ----------------------------------------------------------------------------

    def set_start(self, rank: int, call: int) -> None:
        self.starts.setdefault(rank, call)

    def commit_on_board(self, call: int, oid: int) -> None:
        message, values = self.values[oid]
        for member in self.world.members:
            if member.node == self.number and member.call == call and member.made:
                if not member.gone:
                    value = values.get(member.rank)
                    self.world.judge(self.generation, member, message, value)
                member.made = False
                member.call += 1

    # -- as members ----------------------------------------------------------------------------

    def make(self, member: Member) -> None:
        """The next call of a member that may make one."""
        call, rank, generation = member.call, member.rank, self.generation
        kind, root, _ = self.world.kind(generation, call)
        parts: list[Any] = []
        gives = kind not in ("broadcast", "scatter") or rank == root
        if kind in TARGETED and gives:
            parts = [share(call, rank, target) for target in range(self.world.size)]
        elif kind != "barrier" and gives:
            parts = [share(call, rank)]
        op = "sum" if kind in ("allreduce", "reduce", "scan") else ""
        encoded = [_serialize.encode(part).tobytes() for part in parts]
        member.made = True
        self.world.made.setdefault((generation, call), set()).add(rank)
        self.calls.member_called(
            member.slot, GroupCall(generation, rank, call, kind, op, root, list(encoded))
        )

    # -- as results ----------------------------------------------------------------------------

    def pin(self, slot: int, ask: GroupCall) -> list[Any]:
        self.held.append(ask)
        return [ask]

    def unpin(self, holds: list[Any]) -> None:
        for ask in holds:
            self.held.remove(ask)
        holds.clear()

    def _check_held(self, message: Any, mine: Any) -> None:
        """What lies here and is read here must be there still."""
        there = {(ask.rank, ask.call) for ask in self.held}
        for piece in message.pieces:
            readers = set(mine) - {piece.source}
            if piece.target >= 0:
                readers &= {piece.target}
            elif message.kind == "gather":
                readers &= {message.root}
            if piece.object in self.gave and readers:
                assert (piece.source, message.call) in there, (piece, message)

    def refuse(self, slot: int, ask: GroupCall) -> None:
        raise AssertionError(f"a member made call {ask.call} twice, or too late")

    def part(self, members: GroupMembers, call: int, asks: list[GroupCall]) -> GroupPart:
        first = asks[0]
        large = self.world.kind(members.generation, call)[2]
        # Of one call in five there is more, of which receivers of a broadcast know nothing.
        nbytes = LARGE << (self.world.repeats > 0 and call % 5 == 3)
        pieces = []
        for ask in asks:
            for number, payload in enumerate(ask.parts):
                assert isinstance(payload, bytes)
                target = number if ask.kind in TARGETED else -1
                layout = payload_layout(memoryview(payload))
                numbers = 1, ask.rank, target + 1, call % 256, members.generation % 256
                name = bytes([*numbers, *bytes(11)])
                piece = Piece(ask.rank, target, len(payload), payload, layout=layout)
                if large:
                    piece = Piece(ask.rank, target, nbytes, None, name, layout)
                    self.gave.add(name)
                pieces.append(piece)
        ranks = tuple(ask.rank for ask in asks)
        about = members.generation, members.version, call, ranks
        return GroupPart(*about, first.kind, first.op, first.root, tuple(pieces))

    def move(self, message: Any, done: Callable[[str, str], None], **votes: Any) -> None:
        assert not any(votes.values()), "no call here is the engine's"
        self.moving.append((message, done))
        self.begun.add((message.generation, message.call, message.attempt))
        (plan,) = message.plans or (None,)
        if plan is not None:  # whatever others have begun under that name is the same
            about = message.generation, message.call, message.attempt
            shape = self.world.shapes.setdefault(about, _shape(plan))
            assert shape == _shape(plan), (about, shape, plan)

    def can_move(self, message: Any) -> bool:
        """Whether the bytes of an attempt can have come: those that give some have begun it, too,
        also if no leading node has asked them to."""
        if message is None or not is_repeated(message.attempt):
            return True
        about = message.generation, message.call, message.attempt
        nodes = self.world.nodes
        return all(
            number in nodes and about in nodes[number].begun
            for plan in message.plans
            for number in participants(plan)
        )

    def when_written(self, holds: Any, action: Callable[[], None]) -> None:
        action()

    def drop(self, message: Any, but: Any = ()) -> None:
        self.moving = [one for one in self.moving if one[0] is not message]

    def commit(self, *given: Any) -> Any:
        """Of the board, or of the results: told apart by what they are given."""
        if len(given) == 2:
            return self.commit_on_board(*given)
        message, go, mine = given
        self.world.repeated += go is not None and is_repeated(message.attempt)
        if not message.error:
            self._check_held(message, mine)
        oid = len(self.values) + 1
        values = {} if message.error else {rank: self._value(message, go, rank) for rank in mine}
        self.values[oid] = message, values
        return oid, []

    def _has_come(self, go: Any, piece: Any) -> bool:
        """Has the plan brought that piece here? A node that has begun none needs no piece."""
        for plan in () if go is None else go.plans:
            if isinstance(plan, Distribute):
                return self.number in plan.receivers
            size = len(plan.destinations)
            member = member_of(plan.kind, size, piece.source, piece.target)
            if member in plan.members:
                to = plan.destinations
                return self.number in (to if plan.kind != "alltoall" else to[member % size :][:1])
        return False

    def _value(self, message: Any, go: Any, rank: int) -> Any:
        kind, root, large = self.world.kind(message.generation, message.call)
        if large and message.attempt and go is not None and go.plans:
            assert (go.call, go.attempt) in self.moved or self.number not in go.waits
        call = message.call
        if kind in ("allreduce", "reduce"):
            if kind == "reduce" and rank != root:
                return None
            if message.pieces:
                return bits(message.pieces[0].payload)
            (plan,) = go.plans
            return sum(int(share(call, source)[0]) for source in plan.members)
        found = {}
        for piece in message.pieces:
            if piece.target not in (-1, rank):
                continue
            if piece.payload is not None:
                value = bits(piece.payload)
            elif piece.object not in self.gave and not self._has_come(go, piece):
                continue
            else:
                value = int(share(call, piece.source, max(0, piece.target))[0])
            found[piece.source, piece.target] = value
        if kind == "broadcast":
            return found[root, -1]
        return found
