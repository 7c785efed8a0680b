"""Groups on this host: their boards in shared memory, and their members.

The members of a Group on one host make calls through a board. The planner is involved only when
members join and leave. The node writes the masks of the present members to the boards and wakes the
members. After a member has left or died, the node holds the result that the member had committed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp import _tasks
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.groups.group_state import Known
from hoplite_mp._protocol.groups import GroupEnd
from hoplite_mp._protocol.local import GroupBuffers, GroupJoin, GroupLeave, GroupRefusal, Reply
from hoplite_mp._protocol.membership import ReportedGroup
from hoplite_mp._protocol.messages import (
    GroupAdmitted,
    GroupClosed,
    GroupJoined,
    GroupJoinRequested,
    GroupLeft,
    GroupMemberRemoved,
    GroupMembers,
    GroupRefused,
    GroupTasksEnded,
    GroupTasksQuery,
    NodeToManager,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import _shm
    from hoplite_mp._node.dispatch import ManagerHandler, Requests
    from hoplite_mp._node.groups.group_calls import MultiHostCalls
    from hoplite_mp._node.groups.group_state import GroupState
    from hoplite_mp._node.groups.mailbox import PointToPoint
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.store.budget import Store
    from hoplite_mp._protocol.membership import Report

__all__ = ["HostGroups", "group_waits"]


ENDS_MAX = 64  # number of ended Groups that a node reports to the next manager


# Call buffers: memory in the store for large contributions of members on one host.
#
# Members write to call buffers and read from them without involving the node. A member that has
# requested buffers may write to them until it leaves or dies. The node therefore frees a Group's
# buffers when the Group has ended and all these members have left or died. The board's masks are
# cleared before that, so a member that only reads checks them after reading.


# The buffers of all Groups use at most 1/8 of the store. A lower number: more calls use buffers
# instead of objects, but less memory is left for large objects.
BUFFERS_SHARE = 8


@dataclass(slots=True)
class Buffers:
    """The call buffers of one Group."""

    # Bytes of one buffer -> payload offset of the block with the buffers of all ranks.
    blocks: dict[int, int] = field(default_factory=dict)
    users: set[tuple[int, int]] = field(default_factory=set)  # (client slot, rank)
    ended: bool = False  # the Group has ended


class CallBuffers:
    """The buffers of all Groups on this host."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[int, Buffers] = {}  # generation of a Group -> its buffers

    def ask(self, generation: int, size: int, slot: int, rank: int, nbytes: int) -> int | None:
        """Returns the offset in the store of the first of `2 * size` buffers with `nbytes` each, or
        None if the store has no space. From then on, the member in the slot may use them."""
        buffers = self._of.setdefault(generation, Buffers())
        if nbytes not in buffers.blocks:
            total = 2 * size * nbytes
            if total + self._store.call_buffer_bytes > self._store.limit // BUFFERS_SHARE:
                return None
            if not self._store.has_spare(total):
                return None
            payload = self._store.lease(total, NODE_SLOT, preallocated=True)
            if payload is None:
                return None
            buffers.blocks[nbytes] = payload
            self._store.call_buffer_bytes += self._store.size_of(payload)
        buffers.users.add((slot, rank))
        return buffers.blocks[nbytes]

    def left(self, generation: int, slot: int, rank: int) -> None:
        """Removes a user that has left the Group."""
        buffers = self._of.get(generation)
        if buffers is not None:
            buffers.users.discard((slot, rank))
            self._free_unused(generation, buffers)

    def forget_client(self, slot: int) -> None:
        """Removes all users in a process that has exited."""
        for generation, buffers in list(self._of.items()):
            buffers.users = {one for one in buffers.users if one[0] != slot}
            self._free_unused(generation, buffers)

    def ended(self, generation: int) -> None:
        """Marks a Group as ended. Frees its buffers once they have no users."""
        buffers = self._of.get(generation)
        if buffers is not None:
            buffers.ended = True
            self._free_unused(generation, buffers)

    def _free_unused(self, generation: int, buffers: Buffers) -> None:
        if buffers.ended and not buffers.users:
            for payload in buffers.blocks.values():
                self._store.call_buffer_bytes -= self._store.size_of(payload)
                self._store.free(payload)
            del self._of[generation]


class HostGroupsEvents(Protocol):
    """Requests from this component to the components above it."""

    def runs_again(self, oid: int) -> bool:
        """Whether the task is being run again because its result was lost."""

    def task_of(self, slot: int, call: int) -> tuple[bytes, int]:
        """Returns (cluster-wide id, number of earlier attempts) of the task that is running in the
        slot's process, or (b"", 0). call: the task's local id if several tasks may run there, else
        0."""

    def team_of(self, slot: int, size: int) -> bytes:
        """The id of the `spmd` call whose peer is running in the slot, or b"" if there is none or
        the call does not have `size` peers."""


class HostGroups:
    """All Groups with a member on this host, and their boards."""

    def __init__(
        self,
        host: HostContext,
        requests: Requests,
        messages: PointToPoint,
        events: HostGroupsEvents,
    ) -> None:
        self.client = host.client
        self.tasks = host.tasks
        self.send = host.send_manager
        self.reply = host.reply
        self.requests = requests
        self.messages = messages
        self.events = events
        self.buffers = CallBuffers(host.store)
        self.known: dict[int, Known] = {}  # board -> group
        # Pending join requests: number of the request to the manager -> (number of the process's
        # request to this node, the request to the manager).
        self.joining: dict[int, tuple[int, GroupJoinRequested]] = {}
        self.refused: dict[str, str] = {}  # name of a Group -> text of the last refusal to join it
        self.generations = 0  # the highest generation that this node has received
        # Reported to the next manager: Groups that ended with dead members, Groups that all members
        # left, and Groups known only to have ended.
        self.ends: deque[GroupEnd] = deque(maxlen=ENDS_MAX)
        self.clean_ends: deque[GroupEnd] = deque(maxlen=ENDS_MAX)
        self.bare_ends: deque[GroupEnd] = deque(maxlen=ENDS_MAX)
        # Tasks of this host whose end must be reported to the manager, because members of a Group
        # are waiting for it: task id -> (header, entries that `park` made for this node). There are
        # few, so each poll checks all of them.
        self.awaited: dict[bytes, tuple[int, list[int]]] = {}
        # Members here that the planner removed: slot -> (generation of the Group, rank) -> reason.
        self.given_up: dict[int, dict[tuple[int, int], str]] = {}
        self.hosts: MultiHostCalls | None = None  # None in a cluster of one host
        self._next = 1

    def join(self, ask: GroupJoin, slot: int, number: int, members_max: int) -> None:
        request, self._next = self._next, self._next + 1
        generation = self.client.client_info(slot)["generation"]
        task, tries = self.events.task_of(slot, ask.call)
        asked = GroupJoinRequested(
            request, self.client.number, slot, generation, ask.name, ask.size, ask.rank,
            members_max, task, ask.parent, tuple(ask.founders), tries,
            self.events.team_of(slot, ask.size),
        )  # fmt: skip
        for earlier, (_, before) in self.joining.items():
            if msgspec.structs.replace(asked, request=earlier) == before:
                self.joining[earlier] = number, before  # the request is repeated after Ctrl-C
                return
        self.joining[request] = number, asked
        self.send(asked)

    def leave(self, ask: GroupLeave, slot: int, number: int) -> None:
        """Removes a member. Replies once this node holds the result that the member had committed,
        because other members may still read it."""
        self.hold_committed(slot)
        self.reply(slot, Reply(number))
        self._left(ask, slot)

    def _left(self, ask: GroupLeave, slot: int) -> None:
        for known in self.known.values():
            if known.generation == ask.generation and known.here.get(ask.rank, (-1,))[0] == slot:
                self._gone(known, ask.rank)
        if self.hosts is not None:
            self.hosts.member_left(ask, slot)
        self.given_up.get(slot, {}).pop((ask.generation, ask.rank), None)
        self.buffers.left(ask.generation, slot, ask.rank)
        generation = self.client.client_info(slot)["generation"]
        self.send(
            GroupLeft(ask.name, ask.generation, ask.rank, self.client.number, slot, generation)
        )

    def give_buffers(self, ask: GroupBuffers, slot: int, number: int) -> None:
        """Replies with the offset of a Group's call buffers, or with None if there is no space or
        the process is no longer a member."""
        payload = None
        for known in self.known.values():
            if known.generation == ask.generation and known.here.get(ask.rank, (-1,))[0] == slot:
                payload = self.buffers.ask(
                    ask.generation, known.shown.size, slot, ask.rank, ask.nbytes
                )
        self.reply(slot, Reply(number, payload))

    def why(self, slot: int, ask: GroupRefusal) -> tuple[bool, str]:
        """Returns why the member's Group is not complete: (True, reason) if the member itself was
        removed, otherwise (False, the reason for the last refusal of a join request)."""
        over = self.given_up.get(slot, {}).get((ask.generation, ask.rank))
        return (False, self.refused.get(ask.name, "")) if over is None else (True, over)

    def admitted(self, name: str, generation: int, rank: int) -> None:
        self.send(GroupAdmitted(name, generation, rank))

    def forget_client(self, slot: int, runs_on: bool = False) -> None:
        """Removes the memberships and requests of a process that has exited. runs_on: the process
        has left the cluster but is still running, so it may still write to call buffers."""
        for known in self.known.values():
            for rank in [rank for rank, one in known.here.items() if one[0] == slot]:
                self._gone(known, rank)
                known.died.add(rank)
        self.given_up.pop(slot, None)
        if not runs_on:
            self.buffers.forget_client(slot)
        self.joining = {n: one for n, one in self.joining.items() if one[1].client != slot}

    def _gone(self, known: Known, rank: int) -> None:
        """Removes the member of this rank here before the manager announces its end."""
        del known.here[rank]
        known.left.add(rank)
        self.messages.left(known, rank)

    def report(self) -> Iterator[NodeToManager | Report]:
        """Yields the Groups on this host for a new manager."""
        for known in self.known.values():
            here = tuple((rank, *one) for rank, one in known.here.items())
            left, died = tuple(sorted(known.left)), tuple(sorted(known.died))
            yield ReportedGroup(self.client.number, known.shown, here, left, died)
        yield from self.ends
        yield from self.clean_ends
        yield from self.bare_ends
        yield from (asked for _, asked in self.joining.values())

    @property
    def manager_handlers(self) -> dict[type, ManagerHandler]:
        """Handlers of messages from the manager about Groups."""
        return {
            GroupMembers: self._members_changed,
            GroupJoined: self._joined,
            GroupRefused: self._refuse_join,
            GroupClosed: self._closed,
            GroupTasksQuery: self._await,
            GroupMemberRemoved: self._give_up,
        }

    def _members_changed(self, message: GroupMembers) -> None:
        self.generations = max(self.generations, message.generation)
        known = self.known.get(message.board)
        if known is None or known.generation != message.generation:
            board = _tasks.Board(self.tasks, message.board)
            board.reset(message.size, message.generation)
            if known is not None:  # the former Group on this board has ended
                self.buffers.ended(known.generation)
            known = Known(message.name, message.generation, board, message)
            self.known[message.board] = known
        before, known.shown, me = known.shown, message, self.client.number
        known.left = {  # after a manager's death, the rank may have a new member here
            rank
            for rank in known.left
            if message.nodes[rank] == me and message.since_of(rank) == before.since_of(rank)
        }
        known.died &= known.left
        known.board.set_masks(message.alive, message.joining, message.formed, self.hosts is None)
        if self.hosts is not None:
            self.hosts.changed(message, known)
        self.messages.changed(message, known)

    def _joined(self, message: GroupJoined) -> None:
        number, asked = self.joining.pop(message.request, (0, None))
        if asked is None:  # the previous manager has answered, or the process has exited
            return
        slot, identity = asked.client, (asked.node, asked.client, asked.client_generation)
        known = self.known[message.board]
        known.board.set_client(message.rank, slot)
        known.here[message.rank] = identity[1:]
        hosts = self.hosts is not None
        place = message.board, message.generation, message.rank, hosts, identity
        self.reply(slot, Reply(number, place))
        leaves = GroupLeave(known.name, known.generation, message.rank)
        if self.requests.is_latest(slot, number):
            self.requests.undo_unread(slot, number, lambda: self._left(leaves, slot))
        else:  # the process was interrupted by Ctrl-C and has no Group object
            self._left(leaves, slot)

    def _refuse_join(self, message: GroupRefused) -> None:
        number, asked = self.joining.pop(message.request, (0, None))
        if asked is None:
            return
        if any(known.name == asked.name for known in self.known.values()):
            self.refused[asked.name] = message.message
        text, ended = message.message, message.error == "ended"
        self.reply(asked.client, Reply(number, text) if ended else Reply(number, None, text))

    def _closed(self, message: GroupClosed) -> None:
        self._note_end(message)
        self.messages.closed(message.generation)
        if self.hosts is not None:
            self.hosts.closed(message.generation)
        closed = self.known.get(message.board)
        # After a manager's death, another Group may already be using that board.
        if closed is not None and closed.generation == message.generation:
            del self.known[message.board]
            self.refused.pop(closed.name, None)
            closed.board.set_masks(0, 0, True)
            self.buffers.ended(message.generation)

    def _note_end(self, message: GroupClosed) -> None:
        """Records the end of a Group for the next manager, which must not restore the Group, even
        if another node still reports it as running."""
        end = message.end
        if end is None:
            self.bare_ends.append(GroupEnd(message.name, message.generation, (), (), ()))
        else:
            (self.ends if end.dead else self.clean_ends).append(end)

    def _give_up(self, message: GroupMemberRemoved) -> None:
        """Makes a removed member raise an error that states why its Group will never be complete.
        The member detects its removal because its rank on the board has another client's slot, or
        because the board belongs to another Group."""
        known, rank, slot = self.known.get(message.board), message.rank, message.client
        if known is None or known.generation != message.generation:
            return
        if known.here.get(rank) != (slot, message.client_generation):
            return  # the member has left or died in the meantime
        self.given_up.setdefault(slot, {})[message.generation, rank] = message.message
        self._gone(known, rank)
        known.board.set_client(rank, NODE_SLOT)
        self.tasks.wake(slot)

    def _await(self, message: GroupTasksQuery) -> None:
        """Reports each of these tasks to the manager when it is over. Wherever a task runs, only
        the node of the submitting host knows whether the task is over or will be retried."""
        over = []
        for task in message.tasks:
            if task in self.awaited:
                continue
            host_id, oid = ids.unpack_id(task)
            if host_id != self.client.host_id or self._is_over(oid):
                over.append(task)
            # After `park`, the end of the task wakes this node. `_report_ended` below reports a
            # task that ended just before `park`.
            else:
                self.awaited[task] = oid, self.tasks.park([oid])
        self._report_ended(over)

    def _is_over(self, oid: int) -> bool:
        return self.tasks.done(oid) and not self.events.runs_again(oid)

    def _report_ended(self, over: list[bytes]) -> None:
        """Reports these tasks and all awaited tasks that are over."""
        for task, (oid, parked) in list(self.awaited.items()):
            if self._is_over(oid):
                self.tasks.unpark(parked)
                del self.awaited[task]
                over.append(task)
        if over:
            self.send(GroupTasksEnded(self.client.number, tuple(over)))

    def poll(self) -> None:
        """Reports tasks that are over. Releases a held result once all members have begun the next
        call, because they have then read the result."""
        self._report_ended([])
        for known in self.known.values():
            if known.hold is not None:
                _, alive, joining, _, call, _ = known.board.look()
                if call > known.held_call or not known.board.missing(alive | joining, call):
                    known.hold = None

    def hold_committed(self, slot: int) -> None:
        """Holds the result that members in this process may have committed as leaders, until all
        members have read it."""
        if self.hosts is not None:
            return  # calls over several hosts are led by nodes, not by members
        for known in self.known.values():
            _, _, _, _, call, result = known.board.look()
            if not result:
                continue  # there is no result, or it is on the board and needs no holder
            if any(known.board.member(rank)[3] == slot for rank in range(_tasks.MEMBERS_MAX)):
                known.hold, known.held_call = self.client.hold(result), call


# Reports for dumps: the members for which each Group on this host is waiting.
#
# A Group's call waits until all members have made it. For a Group on one host, the board shows
# which have. For a Group over several hosts, the nodes that collect the contributions know that.


NAME_CHARS = 100  # characters of a group's name that are reported


def group_waits(
    groups: HostGroups, messages: PointToPoint, client: _shm.NodeClient, tasks: _tasks.Tasks
) -> Iterator[dict[str, Any]]:
    """Yields one report for each Group. `call`: the number of the next call; `made`: the ranks that
    have made it; `awaited`: the ranks that have not, as far as this node knows; `unread`: the
    numbers of messages that members here have not received."""
    hosts = groups.hosts
    for known in list(groups.known.values()):
        formed, alive, joining, _, call, _ = known.board.look()
        members = _ranks(alive | joining)
        state = None if hosts is None else hosts.states.get(known.generation)
        found: dict[str, Any] = {
            "name": known.name[:NAME_CHARS],
            "size": known.shown.size,
            "formed": formed,
            "joined": [_member(client.number, tasks, known, state, rank) for rank in members],
            "call": call,
            "kind": "",
            "made": [],
            "awaited": [],
            "leader": "",
            "transferring": [],
            "unread": [
                {"rank": rank, "messages": count}
                for rank, count in messages.unread(known.generation)
            ],
        }
        if formed and state is None:
            missing = _ranks(known.board.missing(alive | joining, call))
            found["awaited"] = missing
            found["made"] = [rank for rank in members if rank not in missing]
        elif formed and state is not None:
            _over_hosts(client.number, state, found)
            if state.owned and hosts is not None:
                _in_engine(client.number, state, hosts.engine_calls.boards[known.generation], found)
        yield found


def _over_hosts(number: int, state: GroupState, found: dict[str, Any]) -> None:
    """Fills in this node's view of a call over several hosts: the calls by members here and, on the
    leading node, the calls by all members."""
    found["call"] = state.calls
    found["leader"] = "" if state.leader is None else f"h{state.leader}"
    called = {
        rank: one.ask for rank, one in state.member_calls.items() if one.ask.call == state.calls
    }
    made, kinds = set(called), {ask.kind for ask in called.values()}
    known = set(state.ranks_of(number))
    if state.leader == number:
        known = set(state.expected())
        for part in state.leading.parts.values():
            if part.call == state.calls:
                made |= set(part.ranks)
                kinds.add(part.kind)
        if state.leading.attempt is not None:
            found["transferring"] = sorted(state.leading.attempt.waiting)
    found["kind"] = " or ".join(sorted(kinds))
    found["made"] = sorted(made)
    found["awaited"] = sorted(known - made)


def _in_engine(
    number: int, state: GroupState, board: _tasks.CollectiveBoard, found: dict[str, Any]
) -> None:
    """Fills in the board's view of calls that the engine owns: which members here have made the
    next call. If all have made it, the call is waiting for other hosts, which only the engine
    knows."""
    call = max(state.calls, board.done())
    here = state.ranks_of(number)
    found["call"], found["kind"], found["transferring"] = call, "", []
    found["made"] = [rank for rank in here if board.given(rank) > call]
    found["awaited"] = [rank for rank in here if board.given(rank) <= call]


def _member(
    number: int, tasks: _tasks.Tasks, known: Known, state: GroupState | None, rank: int
) -> dict[str, Any]:
    at = number
    if state is not None:
        where = state.members.nodes[rank]
        at = number if where is None else where
    slot = known.board.member(rank)[3] if at == number else -1
    return {"rank": rank, "node": at, "pid": tasks.pid(slot) if slot > 0 else 0}


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
