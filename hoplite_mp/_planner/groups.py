"""The members of Groups: their processes, their ranks, and whether calls include them yet.

    forming                                        formed
    ───────                                        ──────
    join  ► alive                                  join  ► joining
    leave ► the rank is free                       admit ► joining becomes alive
    all ranks held ► formed                        leave ► the rank is free
                                                   none alive ► all joining members become alive

For these rules it makes no difference whether a member leaves or dies. When no member is left, the
group is closed, and its name and its board are free. Members are identified by (node, client slot,
generation of the slot), so a late message about a dead process is never attributed to the next
process in the same slot.

After every event `_settle` applies these rules. If the members have changed, it sends a new version
of the member list (GroupMembers) to the members' nodes. The list also contains the data for calls
that involve several nodes: the node of each rank, and the stripes of large calls. The nodes make
calls without the manager.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from hoplite_mp._planner import cost, tree_shapes
from hoplite_mp._planner.group_members import (
    ON_ADMIT,
    ON_JOIN,
    GroupRecord,
    Identity,
    MemberRecord,
    MemberStanding,
    Phase,
    Rejoins,
    Tombstones,
    Vacated,
    ended_text,
    vacated_text,
)
from hoplite_mp._planner.group_recovery import RecoveredGroups
from hoplite_mp._protocol.groups import NO_TASK
from hoplite_mp._protocol.messages import (
    SHARES,
    GroupAdmitted,
    GroupClosed,
    GroupJoined,
    GroupJoinRequested,
    GroupLeft,
    GroupMemberRemoved,
    GroupMembers,
    GroupRefused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from hoplite_mp._planner.link_speeds import LinkSpeeds
    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.groups import GroupEnd, GroupTasksEnded
    from hoplite_mp._protocol.membership import ReportedGroup
    from hoplite_mp._protocol.messages import ManagerToNode, Stripe


class GroupRegistry:
    """All groups of a cluster, by name."""

    def __init__(
        self,
        boards_max: int,
        speeds: LinkSpeeds,
        node_of: Callable[[int], int | None] = lambda host_id: 0,
    ) -> None:
        """node_of: returns the living node of a host, or None."""
        self._boards_max = boards_max
        self._speeds = speeds
        self._generation = 0  # number of groups made so far
        self.groups: dict[str, GroupRecord] = {}
        self.ends = Tombstones()
        self.returns = Rejoins(node_of)
        self.vacated = Vacated()

    def join(self, message: GroupJoinRequested) -> list[Send]:
        """Assigns a rank to the requester, or refuses with a reason. A repeated request gets the
        same answer."""
        group = self.groups.get(message.name)
        assigned = None if group is None else _find_request(group, message)
        if group is not None and assigned is not None:
            return [(message.node, _answer(group, assigned, message.request))]
        refusal = self._over(group, message)
        refusal = refusal or _refusal(group, message) or self._no_board(group, message)
        if refusal is not None:
            return [(message.node, refusal)]
        group = group or self._open(message)
        if message.parent and not group.parent:
            group.parent, group.founders = message.parent, message.founders
        rank = group.free_rank() if message.rank is None else message.rank
        assert rank is not None
        identity = Identity(message.node, message.client, message.client_generation)
        standing = ON_JOIN[group.phase]
        member = MemberRecord(identity, message.request, standing, message.task, message.tries)
        member.team = message.team
        for vacated, holder in self.vacated.take(group.name, group.size, member.team).items():
            group.holders.setdefault(vacated, holder)
        self._take(group, rank, member)
        group.nodes.add(message.node)
        sends = self._settle(group)
        if group.members.get(rank) is not member:
            text = self._why_hopeless(group)
            return [*sends, (message.node, GroupRefused(message.request, text, "ended"))]
        return [*sends, (message.node, _answer(group, rank, message.request))]

    def _take(self, group: GroupRecord, rank: int, member: MemberRecord) -> None:
        member.mates = self.ends.mates(group.name, member.task, member.run)
        group.take(rank, member)

    def tasks_over(self, message: GroupTasksEnded) -> list[Send]:
        """Handles a report of ended tasks. Removes members that are waiting for these tasks."""
        self.returns.told(message)
        return self._settle_forming()

    def admit(self, message: GroupAdmitted) -> list[Send]:
        """Records that the living members have admitted a joining member."""
        group = self._known(message.name, message.generation)
        member = None if group is None else group.members.get(message.rank)
        if group is None or member is None:
            return []
        member.standing = ON_ADMIT.get(member.standing, member.standing)
        return self._settle(group)

    def leave(self, message: GroupLeft) -> list[Send]:
        """Records that a member closed its Group."""
        group = self._known(message.name, message.generation)
        member = None if group is None else group.members.get(message.rank)
        leaver = Identity(message.node, message.client, message.client_generation)
        if group is None or member is None or member.identity != leaver:
            return []
        del group.members[message.rank]
        group.left = True
        return self._settle(group) + self._settle_forming()

    def lose_client(self, node: int, client: int, generation: int) -> list[Send]:
        """Removes the process with this generation of the slot, and all earlier processes in the
        slot, from all groups, because they have ended."""
        sends: list[Send] = []
        for group in list(self.groups.values()):
            lost = [
                rank
                for rank, member in group.members.items()
                if member.identity[:2] == (node, client) and member.identity[2] <= generation
            ]
            sends += self._remove(group, lost)
        return sends + self._settle_forming()

    def lose_node(self, node: int) -> list[Send]:
        """Records the death of all members on a lost node, to which no more messages are sent."""
        sends: list[Send] = []
        self.returns.lose_node(node)
        for group in list(self.groups.values()):
            if node not in group.nodes:
                continue
            group.nodes.discard(node)
            group.lose([r for r, m in group.members.items() if m.identity.node == node])
            # Even without lost members, because `former` has changed.
            sends += self._settle(group)
        return sends + self._settle_forming()

    def go_on(self, generations: int) -> None:
        """Continues the numbering of the previous planner's groups."""
        self._generation = max(self._generation, generations)

    def remember(self, ends: Iterable[GroupEnd]) -> None:
        """Records groups that ended under the previous planner."""
        for end in ends:
            self._generation = max(self._generation, end.generation)
            self.ends.add(end)

    def restore(
        self,
        held: Sequence[ReportedGroup],
        joins: Iterable[GroupJoinRequested],
        members: Collection[int],
        closed: Mapping[int, GroupEnd] = MappingProxyType({}),
    ) -> list[Send]:
        """Restores the groups of the previous planner from the reports of the members' nodes.
        `joins`: the requests whose answers these nodes have not received. `members`: the living
        nodes. `closed`: the ends of groups that at least one node has received, by generation."""
        found = RecoveredGroups(held, joins, members, closed, self._take)
        self._generation = max(self._generation, found.generation)
        self.groups.update(found.groups)
        sends = list(found.sends)
        for group in found.ended:
            sends += self._close(group, closed.get(group.generation))
        for group in list(self.groups.values()):
            sends += found.find_unheard(group)
            sends += self._settle(group) or found.missed(group)
        return sends + self._settle_forming()

    def _settle_forming(self) -> list[Send]:
        """Settles all groups that are not formed yet. Called after events that may end their wait:
        a founder has left or died, or tasks that might have joined are over."""
        forming = [group for group in self.groups.values() if group.phase is Phase.FORMING]
        awaited = {task for g in forming for m in g.members.values() for task in m.mates or ()}
        awaited.update(task for g in forming for task, _ in g.vacated.values())
        self.returns.keep(awaited)
        return [send for group in forming for send in self._settle(group)]

    def _give_up(self, group: GroupRecord) -> list[Send]:
        """Removes the members of a forming group whose other members can no longer join."""
        if not group.members:
            return []
        waiting = {rank: (member.task, member.mates) for rank, member in group.members.items()}
        mates = {task for _, some in waiting.values() for task in some or ()}
        vacated = {task for task, _ in group.vacated.values()}
        sends = self.returns.ask((mates | vacated) - {task for task, _ in waiting.values()})
        never = self._never_again(group)
        text = self._why_hopeless(group)
        for rank in list(waiting) if never else self.returns.hopeless(waiting):
            member = group.members.pop(rank)
            group.tasks.pop(member.task, None)
            group.holders.pop(rank, None)
            node, client, client_generation = member.identity
            message = GroupMemberRemoved(
                name=group.name,
                generation=group.generation,
                board=group.board,
                rank=rank,
                client=client,
                client_generation=client_generation,
                message=text,
            )
            sends.append((node, message))
        return sends

    def _never_again(self, group: GroupRecord) -> list[int]:
        """The free ranks whose last members cannot join again."""
        vacated = group.vacated.items()
        return sorted(rank for rank, (task, _) in vacated if self.returns.is_over(task))

    def _why_hopeless(self, group: GroupRecord) -> str:
        ranks = self._never_again(group)
        return vacated_text(group.name, group.size, ranks) if ranks else ended_text(group.name)

    def _remove(self, group: GroupRecord, ranks: list[int]) -> list[Send]:
        group.lose(ranks)
        return self._settle(group) if ranks else []

    def _known(self, name: str, generation: int) -> GroupRecord | None:
        group = self.groups.get(name)
        return group if group is not None and group.generation == generation else None

    def _over(self, group: GroupRecord | None, message: GroupJoinRequested) -> GroupRefused | None:
        tasks = () if group is None else group.tasks
        text = self.ends.refusal(message.name, message.task, tasks)
        return GroupRefused(message.request, text, "ended") if text else None

    def _no_board(
        self, group: GroupRecord | None, message: GroupJoinRequested
    ) -> GroupRefused | None:
        if group is not None or len(self.groups) < self._boards_max:
            return None
        text = (
            f"group {message.name!r} cannot be made: {self._boards_max} groups exist, and no more "
            "are allowed; close one"
        )
        return GroupRefused(message.request, text, "full")

    def _open(self, message: GroupJoinRequested) -> GroupRecord:
        used = {group.board for group in self.groups.values()}
        board = next(board for board in range(self._boards_max) if board not in used)
        self._generation += 1
        group = GroupRecord(message.name, self._generation, board, message.size)
        self.groups[message.name] = group
        return group

    def _settle(self, group: GroupRecord) -> list[Send]:
        """Applies the rules, and sends any changes to the members' nodes."""
        awaited = awaits_founders(group, self.groups.values())
        forming = group.phase is Phase.FORMING and len(group.members) < group.size
        return (self._give_up(group) if forming else []) + self._settled(group, awaited)

    def _close(self, group: GroupRecord, announced: GroupEnd | None = None) -> list[Send]:
        """Ends a group without members. announced: the end of the group as the previous planner
        announced it."""
        end = group.end if group.left and group.phase is Phase.FORMED else None
        if announced is not None:  # the reports from which `group` was restored may be out of date
            end = announced if announced.tasks else None
        elif end is not None:
            self.ends.add(end)
        return _to_all(group, GroupClosed(group.name, group.generation, group.board, end))

    def _settled(self, group: GroupRecord, awaited: bool) -> list[Send]:
        if not group.members and not awaited:
            del self.groups[group.name]
            self.vacated.add(group.name, group.size, group.vacated)
            return self._close(group)
        if not group.members:  # the group is empty, but a founder may still join
            return []
        if len(group.members) == group.size or (group.parent and not awaited):
            group.phase = Phase.FORMED
        if not group.mask(MemberStanding.ALIVE):
            for member in group.members.values():
                member.standing = MemberStanding.ALIVE
        shown = group.shown
        alive, joining = group.mask(MemberStanding.ALIVE), group.mask(MemberStanding.JOINING)
        nodes = tuple(
            group.members[rank].identity.node if rank in group.members else None
            for rank in range(group.size)
        )
        formed = group.phase is Phase.FORMED
        former = tuple(sorted(group.nodes.difference(nodes)))
        changed = (alive, joining, formed, nodes, former)
        new = any(not member.since for member in group.members.values())
        if shown and _shown(shown) == changed and not new:
            return []
        group.versions += 1
        if formed and not group.whole:
            group.whole = group.versions
        for member in group.members.values():
            member.since = member.since or group.versions
        group.shown = GroupMembers(
            name=group.name,
            generation=group.generation,
            board=group.board,
            size=group.size,
            alive=alive,
            joining=joining,
            formed=formed,
            version=group.versions,
            nodes=nodes,
            stripes=self._stripes(group),
            former=former,
            first=formed and not (shown and shown.formed),
            tasks=tuple(
                group.members[rank].task if rank in group.members else NO_TASK
                for rank in range(group.size)
            ),
            tries=tuple(
                group.members[rank].tries if rank in group.members else 0
                for rank in range(group.size)
            ),
            since=tuple(
                group.members[rank].since if rank in group.members else 0
                for rank in range(group.size)
            ),
            past=group.end,
            left=group.left,
            parent=group.parent,
            founders=group.founders,
            founders_joined=group.come if group.parent else 0,
            whole=group.whole,
            holders=()
            if formed
            else tuple(group.holders.get(rank, (NO_TASK, NO_TASK)) for rank in range(group.size)),
        )
        return _to_all(group, group.shown)

    def _stripes(self, group: GroupRecord) -> tuple[Stripe, ...]:
        """The stripes of large calls. Their owners are the nodes of the living members in rank
        order, with shares proportional to their link speeds."""
        nodes = [
            group.members[rank].identity.node
            for rank in sorted(group.members)
            if group.members[rank].standing is MemberStanding.ALIVE
        ]
        nodes = list(dict.fromkeys(nodes))
        _, shares = cost.allreduce(SHARES, self._speeds.hosts(nodes))
        return tree_shapes.cut(zip(nodes, shares, strict=True))


def awaits_founders(group: GroupRecord, groups: Iterable[GroupRecord]) -> bool:
    """Whether a founder of the group may still join. Only a group that was split from a parent
    group has founders. They may join as long as they are members of the parent. If the group names
    no founders, they are all members of the parent, at the same ranks."""
    if not group.parent or group.phase is Phase.FORMED:
        return False
    parent = next((other for other in groups if other.generation == group.parent), None)
    if parent is None:
        return False
    if not group.founders:
        return any(not group.come >> rank & 1 for rank in parent.members)
    for rank, (parent_rank, *identity) in enumerate(group.founders):
        member = parent.members.get(parent_rank)
        remains = member is not None and member.identity == Identity(*identity)
        if remains and not group.come >> rank & 1:
            return True
    return False


def _shown(shown: GroupMembers) -> tuple[object, ...]:
    return shown.alive, shown.joining, shown.formed, shown.nodes, shown.former


def _to_all(group: GroupRecord, message: ManagerToNode) -> list[Send]:
    return [(node, message) for node in sorted(group.nodes)]


def _answer(group: GroupRecord, rank: int, request: int) -> GroupJoined:
    return GroupJoined(
        request=request,
        name=group.name,
        generation=group.generation,
        rank=rank,
        size=group.size,
        board=group.board,
        formed=group.phase is Phase.FORMED,
        admitted=group.members[rank].standing is MemberStanding.ALIVE,
    )


def _find_request(group: GroupRecord, message: GroupJoinRequested) -> int | None:
    """The rank that was assigned to the same request before, or None."""
    identity = Identity(message.node, message.client, message.client_generation)
    for rank, member in group.members.items():
        if member.identity == identity and member.request == message.request:
            return rank
    return None


def _refusal(group: GroupRecord | None, message: GroupJoinRequested) -> GroupRefused | None:
    """The refusal of a join request, with the most basic reason. None if the request is valid."""
    name, size, rank = message.name, message.size, message.rank
    text = None
    if group is not None and size != group.size:
        text = f"group {name!r} has size {group.size}, this caller asked for size {size}"
    elif not 1 <= size <= message.members_max:
        text = f"group {name!r}: size must be from 1 to {message.members_max}, not {size}"
    elif rank is not None and not 0 <= rank < size:
        text = f"group {name!r} has ranks 0 to {size - 1}, this caller asked for rank {rank}"
    elif group is not None and rank is None and group.free_rank() is None:
        text = f"group {name!r} has all its {size} members, this caller is one too many"
    elif group is not None and rank in group.members:
        text = f"rank {rank} of group {name!r} is taken by a living member"
    return None if text is None else GroupRefused(message.request, text)
