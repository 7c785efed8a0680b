"""Restores the Groups of a dead manager from the reports of the members' nodes.

A manager announces the members of a Group as a numbered version of its member list (GroupMembers).
The dead manager may have announced a change to only some of the nodes, so reports about a Group may
differ. The latest version is valid. A node's report about a member is valid if the latest version
has the same member at that rank. If the answer to a join request was lost, the request is matched
with a rank that the latest version assigns to the node that sent the request.
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
    """All Groups that nodes have reported. `groups`: the existing Groups, by name. `ended`: the
    Groups that have ended, but whose end some node has not received. `generation`: the highest
    generation of any Group."""

    def __init__(
        self,
        held: Sequence[ReportedGroup],
        joins: Iterable[GroupJoinRequested],
        members: Collection[int],
        closed: Collection[int],
        take: Callable[[GroupRecord, int, MemberRecord], None],
    ) -> None:
        """joins: requests whose answers have not been received. members: the living nodes. closed:
        the generations of Groups whose end some node has received. take: adds a member."""
        self.groups: dict[str, GroupRecord] = {}
        self.ended: list[GroupRecord] = []
        self.sends: list[Send] = []
        self.generation = max((report.shown.generation for report in held), default=0)
        self._held = held
        self._unanswered = list(joins)
        self._members = members
        self._take = take
        self._gone: dict[int, set[int]] = {}  # generation -> ranks whose members have left or died
        latest = latest_shown([report.shown for report in held])
        over = superseded(latest.values()) | latest.keys() & set(closed)
        ended: dict[int, GroupRecord] = {}
        for report in held:
            shown = latest[report.shown.generation]
            if shown.generation in over:
                group = ended.setdefault(shown.generation, restored(shown))
                self.sends += [
                    (report.node, _removed(shown, rank, client, generation))
                    for rank, client, generation in report.here
                ]
            else:
                group = self.groups.setdefault(shown.name, restored(shown))
                self._note_members(group, report, shown)
            group.nodes.add(report.node)
            group.left = group.left or not set(report.left) <= set(report.died)
            left = [rank for rank in report.left if _is_latest(report, shown, rank)]
            group.hear(left, [rank for rank in report.died if _is_latest(report, shown, rank)])
            if shown.generation not in over:
                self._gone.setdefault(shown.generation, set()).update(left)
                if shown.formed:  # the answer to the last join request may not have arrived
                    self._reassign(group, report.node, left)
        self.ended = list(ended.values())

    def _note_members(self, group: GroupRecord, report: ReportedGroup, shown: GroupMembers) -> None:
        """Adds the members that the node reports and that the latest version contains."""
        if shown.formed and not report.shown.formed and group.shown is not None:
            # This node does not know that the group is formed. A difference in `formed` makes
            # `_settle` send a new version to all nodes.
            group.shown = msgspec.structs.replace(group.shown, formed=False)
        for rank, client, generation in report.here:
            if shown.nodes[rank] != report.node or not _is_latest(report, shown, rank):
                self.sends.append((report.node, _removed(shown, rank, client, generation)))
                continue
            standing = MemberStanding.JOINING if shown.joining >> rank & 1 else MemberStanding.ALIVE
            identity = Identity(report.node, client, generation)
            tries = shown.tries[rank] if rank < len(shown.tries) else 0
            member = MemberRecord(identity, NO_REQUEST, standing, group.task_at(rank), tries)
            member.since = shown.since_of(rank)
            member.team = group.holders.get(rank, (NO_TASK, NO_TASK))[1]
            self._take(group, rank, member)

    def find_unheard(self, group: GroupRecord) -> list[Send]:
        """Finds the members on nodes that have never received a version of that Group. Returns the
        messages to such nodes that have no remaining members. Must be called once for each Group,
        in any order, before the Group is settled."""
        self._reassign_unreached(group)
        sends = self._notify_unreached(group)
        requesting = {join.task for join in self._unanswered if join.name == group.name}
        known = group.members.keys() | self._gone.get(group.generation, set())
        for rank, node in enumerate(group.shown.nodes if group.shown is not None else ()):
            if node is not None and rank not in known:
                # The node has not reported this member. Either the member's request will be sent
                # again, or the member has died.
                if group.task_at(rank) not in requesting:
                    group.die(group.task_at(rank))
                group.come &= ~(1 << rank)
        return sends

    def missed(self, group: GroupRecord) -> list[Send]:
        """Sends the latest version to the nodes of that Group that may not have received it."""
        if group.shown is None:
            return []
        return [
            (report.node, group.shown)
            for report in self._held
            if report.shown.generation == group.generation and report.shown.version < group.versions
        ]

    def _reached(self, group: GroupRecord) -> set[int]:
        """The nodes that have received some version of that Group."""
        return {report.node for report in self._held if report.shown.generation == group.generation}

    def _reassign_unreached(self, group: GroupRecord) -> None:
        """Like `_reassign`, for all nodes that have received no version."""
        if group.shown is None or group.phase is not Phase.FORMED:
            return
        nodes = {node for node in group.shown.nodes if node is not None}
        for node in sorted(nodes - self._reached(group)):
            if self._reassign(group, node, ()):
                group.nodes.add(node)
                # A new version will be sent, as in `_note_members`.
                group.shown = msgspec.structs.replace(group.shown, formed=False)

    def _notify_unreached(self, group: GroupRecord) -> list[Send]:
        """Sends the latest version of a formed group to nodes that never received a version because
        their members died early. They answer that they have no contributions. Otherwise calls would
        wait for them indefinitely."""
        shown = group.shown
        if shown is None or not shown.formed:
            return []
        nodes = {node for node in shown.nodes if node is not None and node in self._members}
        unreached = nodes - self._reached(group) - group.nodes
        group.nodes |= unreached
        return [(node, shown) for node in sorted(unreached)]

    def _reassign(self, group: GroupRecord, node: int, left: Collection[int]) -> bool:
        """Assigns the ranks that the latest version has for a node to the unanswered requests from
        that node. The requesters are members since call 0, because no call can have been made
        without them. left: ranks whose members on that node have left or died. Returns whether any
        rank was assigned."""
        assert group.shown is not None
        found = False
        wanted = node, group.name, group.size
        for join in [
            join for join in self._unanswered if (join.node, join.name, join.size) == wanted
        ]:
            for rank, at in enumerate(group.shown.nodes):
                if rank in left or not is_founder(group.shown, rank):
                    continue  # a former member has received the answer for this rank
                if at == node and rank not in group.members and join.rank in (None, rank):
                    identity = Identity(join.node, join.client, join.client_generation)
                    member = MemberRecord(
                        identity, join.request, MemberStanding.ALIVE, join.task, join.tries
                    )
                    member.since = group.shown.since_of(rank)
                    member.team = join.team
                    self._take(group, rank, member)
                    self._unanswered.remove(join)
                    found = True
                    break
        return found


def latest_shown(shown: Iterable[GroupMembers]) -> dict[int, GroupMembers]:
    """The latest reported version of each group, by its generation."""
    latest: dict[int, GroupMembers] = {}
    for version in shown:
        known = latest.get(version.generation)
        if known is None or known.version < version.version:
            latest[version.generation] = version
    return latest


def superseded(shown: Collection[GroupMembers]) -> set[int]:
    """The generations of groups whose name or board belongs to a later group. These groups have
    ended, but some node has not received the end."""
    newest: dict[str | int, int] = {}  # name or board -> generation of the latest group with it
    for one in shown:
        for key in (one.name, one.board):
            newest[key] = max(newest.get(key, 0), one.generation)
    return {
        one.generation for one in shown if max(newest[one.name], newest[one.board]) > one.generation
    }


def is_founder(shown: GroupMembers, rank: int) -> bool:
    """Whether the member at that rank is alive and was a member when the group was formed."""
    return bool(shown.alive >> rank & 1 and shown.since_of(rank) <= shown.whole)


def restored(shown: GroupMembers) -> GroupRecord:
    """Returns the group according to the latest version from the previous planner, without its
    members."""
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


def _is_latest(report: ReportedGroup, shown: GroupMembers, rank: int) -> bool:
    """Whether the latest version has the same member at that rank as the version that the node has
    received."""
    return report.shown.since_of(rank) == shown.since_of(rank)


def _removed(shown: GroupMembers, rank: int, client: int, generation: int) -> GroupMemberRemoved:
    return GroupMemberRemoved(
        name=shown.name,
        generation=shown.generation,
        board=shown.board,
        rank=rank,
        client=client,
        client_generation=generation,
        message=struck_text(shown.name),
    )
