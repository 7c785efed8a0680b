"""Reports, for dumps, which members each Group on this host is waiting for.

A Group's call waits for the members that have not made it. For a Group on one host the board tells
which; for a Group over several hosts, the nodes that collect the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import _shm, _tasks
    from hoplite_mp._node.groups.group_state import GroupState, Known
    from hoplite_mp._node.groups.groups import HostGroups
    from hoplite_mp._node.groups.point_to_point import PointToPoint

__all__ = ["group_waits"]

NAME_CHARS = 100  # characters of a group's name that are reported


def group_waits(
    groups: HostGroups, messages: PointToPoint, client: _shm.NodeClient, tasks: _tasks.Tasks
) -> Iterator[dict[str, Any]]:
    """Yields one report for each Group. `call`: the number of the next call; `made`: ranks that
    have made it; `awaited`: ranks that have not, as far as this node knows; `unread`: messages that
    members here have not received."""
    hosts = groups.hosts
    for known in list(groups.known.values()):
        formed, alive, joining, _, call, _ = known.board.look()
        members = _ranks(alive | joining)
        state = None if hosts is None else hosts.states.get(known.generation)
        found: dict[str, Any] = {
            "name": known.name[:NAME_CHARS],
            "size": known.shown.size,
            "formed": formed,
            "came": [_member(client.number, tasks, known, state, rank) for rank in members],
            "call": call,
            "kind": "",
            "made": [],
            "awaited": [],
            "leader": "",
            "moving": [],
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
                _in_engine(client.number, state, hosts.small.boards[known.generation], found)
        yield found


def _over_hosts(number: int, state: GroupState, found: dict[str, Any]) -> None:
    """Fills in what this node knows of a call over several hosts: its own members' calls and, if it
    leads, those of the others."""
    found["call"] = state.calls
    found["leader"] = "" if state.leader is None else f"h{state.leader}"
    called = {
        rank: one.ask for rank, one in state.member_calls.items() if one.ask.call == state.calls
    }
    made, kinds = set(called), {ask.kind for ask in called.values()}
    known = set(state.ranks_of(number))
    if state.leader == number:
        known = set(state.expected())
        for part in state.parts.values():
            if part.call == state.calls:
                made |= set(part.ranks)
                kinds.add(part.kind)
        if state.in_progress is not None:
            found["moving"] = sorted(state.in_progress.waiting)
    found["kind"] = " or ".join(sorted(kinds))
    found["made"] = sorted(made)
    found["awaited"] = sorted(known - made)


def _in_engine(
    number: int, state: GroupState, board: _tasks.SmallBoard, found: dict[str, Any]
) -> None:
    """Fills in what the board shows of calls that the engine owns, that is, which members here have
    made the next one. If all have, members elsewhere are awaited, which only the engine knows."""
    call = max(state.calls, board.done())
    here = state.ranks_of(number)
    found["call"], found["kind"], found["moving"] = call, "", []
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
