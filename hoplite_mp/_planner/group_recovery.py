"""Restores the Groups of a dead manager from the reports of the members' nodes.

The dead manager may have announced a change to only some of the nodes, so reports of one Group may
differ. The latest version is valid. A node's report about a member is valid if the latest version
shows the same member. If the answer to a join request was lost, the request is matched with a rank
that the latest version shows at its node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._planner.group_members import (
    NO_REQUEST,
    GroupRecord,
    Identity,
    MemberRecord,
    MemberStanding,
    Phase,
    struck_text,
)
from hoplite_mp._protocol.groups import NO_TASK
from hoplite_mp._protocol.messages import GroupMemberRemoved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.membership import ReportedGroup
    from hoplite_mp._protocol.messages import GroupJoinRequested, GroupMembers

__all__ = ["RecoveredGroups"]


class RecoveredGroups:
    """All Groups that nodes have reported. `groups`: living Groups, by name. `ended`: Groups that
    have ended, although some node has not received the end. `generation`: the highest
    generation."""

    def __init__(
        self,
        held: Sequence[ReportedGroup],
        joins: Iterable[GroupJoinRequested],
        members: Collection[int],
        closed: Collection[int],
        take: Callable[[GroupRecord, int, MemberRecord], None],
    ) -> None:
        """joins: requests without a received answer. members: living nodes. closed: generations of
        Groups whose end some node has received. take: adds a member."""
        self.groups: dict[str, GroupRecord] = {}
        self.ended: list[GroupRecord] = []
        self.sends: list[Send] = []
        self.generation = max((one.shown.generation for one in held), default=0)
        self._held = held
        self._unread = list(joins)
        self._members = members
        self._take = take
        self._gone: dict[int, set[int]] = {}  # generation -> ranks whose members have left or died
        latest = latest_shown([one.shown for one in held])
        over = superseded(latest.values()) | latest.keys() & set(closed)
        ended: dict[int, GroupRecord] = {}
        for one in held:
            shown = latest[one.shown.generation]
            if shown.generation in over:
                group = ended.setdefault(shown.generation, restored(shown))
                self.sends += [
                    (one.node, _given_up(shown, rank, client, generation))
                    for rank, client, generation in one.here
                ]
            else:
                group = self.groups.setdefault(shown.name, restored(shown))
                self._note_members(group, one, shown)
            group.nodes.add(one.node)
            group.left = group.left or not set(one.left) <= set(one.died)
            left = [rank for rank in one.left if _is_latest(one, shown, rank)]
            group.hear(left, [rank for rank in one.died if _is_latest(one, shown, rank)])
            if shown.generation not in over:
                self._gone.setdefault(shown.generation, set()).update(left)
                if shown.formed:  # the answer to the last join may not have arrived
                    self._give_back(group, one.node, left)
        self.ended = list(ended.values())

    def _note_members(self, group: GroupRecord, one: ReportedGroup, shown: GroupMembers) -> None:
        """Adds the members that the node reports and the latest version shows."""
        if shown.formed and not one.shown.formed and group.shown is not None:
            # Some nodes do not know that the group is formed, so all are informed again.
            group.shown = msgspec.structs.replace(group.shown, formed=False)
        for rank, client, generation in one.here:
            if shown.nodes[rank] != one.node or not _is_latest(one, shown, rank):
                self.sends.append((one.node, _given_up(shown, rank, client, generation)))
                continue
            standing = MemberStanding.JOINING if shown.joining >> rank & 1 else MemberStanding.ALIVE
            identity = Identity(one.node, client, generation)
            tries = shown.tries[rank] if rank < len(shown.tries) else 0
            member = MemberRecord(identity, NO_REQUEST, standing, group.task_at(rank), tries)
            member.since = shown.since_of(rank)
            member.team = group.holders.get(rank, (NO_TASK, NO_TASK))[1]
            self._take(group, rank, member)

    def find_unheard(self, group: GroupRecord) -> list[Send]:
        """Finds the members at nodes that have never received a version of that Group. Returns the
        messages to nodes without remaining members. Call this once for each Group, in any order,
        before the Group is settled."""
        self._give_back_unheard(group)
        sends = self._tell_unheard(group)
        asks = {join.task for join in self._unread if join.name == group.name}
        known = group.members.keys() | self._gone.get(group.generation, set())
        for rank, node in enumerate(group.shown.nodes if group.shown is not None else ()):
            if node is not None and rank not in known:
                # The node does not know this member: the member's request will be sent again, or
                # the member has died.
                if group.task_at(rank) not in asks:
                    group.die(group.task_at(rank))
                group.come &= ~(1 << rank)
        return sends

    def missed(self, group: GroupRecord) -> list[Send]:
        """The latest version, for the nodes of that Group that may not have received it."""
        if group.shown is None:
            return []
        return [
            (one.node, group.shown)
            for one in self._held
            if one.shown.generation == group.generation and one.shown.version < group.versions
        ]

    def _heard(self, group: GroupRecord) -> set[int]:
        """The nodes that have received some version of that Group."""
        return {one.node for one in self._held if one.shown.generation == group.generation}

    def _give_back_unheard(self, group: GroupRecord) -> None:
        """Like `_give_back`, for nodes that received no version."""
        if group.shown is None or group.phase is not Phase.FORMED:
            return
        nodes = {one for one in group.shown.nodes if one is not None}
        for node in sorted(nodes - self._heard(group)):
            if self._give_back(group, node, ()):
                group.nodes.add(node)
                # The node is informed that the group is formed.
                group.shown = msgspec.structs.replace(group.shown, formed=False)

    def _tell_unheard(self, group: GroupRecord) -> list[Send]:
        """Sends the version of a formed group to nodes that never received a version because their
        members died early. Such a node answers that it has no more contributions. Without this
        message, calls would wait for the node indefinitely."""
        shown = group.shown
        if shown is None or not shown.formed:
            return []
        nodes = {node for node in shown.nodes if node is not None and node in self._members}
        unheard = nodes - self._heard(group) - group.nodes
        group.nodes |= unheard
        return [(node, shown) for node in sorted(unheard)]

    def _give_back(self, group: GroupRecord, node: int, left: Collection[int]) -> bool:
        """Gives the ranks that a version shows at a node to that node's unanswered requests. The
        requesters are members from call 0 on, because no call can have been made without them.
        left: ranks whose members on that node have left or died. Returns False if there is no such
        request."""
        assert group.shown is not None
        found = False
        about = node, group.name, group.size
        for join in [join for join in self._unread if (join.node, join.name, join.size) == about]:
            for rank, its in enumerate(group.shown.nodes):
                if rank in left or not is_founder(group.shown, rank):
                    continue  # a former member has read the answer for this rank
                if its == node and rank not in group.members and join.rank in (None, rank):
                    identity = Identity(join.node, join.client, join.client_generation)
                    member = MemberRecord(
                        identity, join.request, MemberStanding.ALIVE, join.task, join.tries
                    )
                    member.since = group.shown.since_of(rank)
                    member.team = join.team
                    self._take(group, rank, member)
                    self._unread.remove(join)
                    found = True
                    break
        return found


def latest_shown(shown: Iterable[GroupMembers]) -> dict[int, GroupMembers]:
    """The latest reported version of each group, by its generation."""
    latest: dict[int, GroupMembers] = {}
    for one in shown:
        known = latest.get(one.generation)
        if known is None or known.version < one.version:
            latest[one.generation] = one
    return latest


def superseded(shown: Collection[GroupMembers]) -> set[int]:
    """The generations of groups whose name or board belongs to a later group. These groups have
    ended, although some node has not received the end."""
    newest: dict[str | int, int] = {}  # name or board -> the latest group that has it
    for one in shown:
        for key in (one.name, one.board):
            newest[key] = max(newest.get(key, 0), one.generation)
    return {
        one.generation for one in shown if max(newest[one.name], newest[one.board]) > one.generation
    }


def is_founder(shown: GroupMembers, rank: int) -> bool:
    """Whether the living member of that rank was a member when the group was formed."""
    return bool(shown.alive >> rank & 1 and shown.since_of(rank) <= shown.whole)


def restored(shown: GroupMembers) -> GroupRecord:
    """The group as in the latest version from the previous planner, without its members."""
    group = GroupRecord(shown.name, shown.generation, shown.board, shown.size)
    group.phase = Phase.FORMED if shown.formed else Phase.FORMING
    group.shown, group.versions = shown, shown.version
    if shown.past is not None:
        group.tasks.update(zip(shown.past.tasks, shown.past.runs, strict=True))
        group.dead.update(dict.fromkeys(shown.past.dead))
        group.open = shown.past.open
    group.left, group.whole = shown.left, shown.whole
    group.holders.update(enumerate(shown.holders))
    group.parent, group.founders, group.come = shown.parent, shown.founders, shown.founders_joined
    return group


def _is_latest(one: ReportedGroup, shown: GroupMembers, rank: int) -> bool:
    """Whether the latest version shows the same member at that rank as the node's version does."""
    return one.shown.since_of(rank) == shown.since_of(rank)


def _given_up(shown: GroupMembers, rank: int, client: int, generation: int) -> GroupMemberRemoved:
    return GroupMemberRemoved(
        name=shown.name,
        generation=shown.generation,
        board=shown.board,
        rank=rank,
        client=client,
        client_generation=generation,
        message=struck_text(shown.name),
    )
