"""The result that the planner returns to the manager's loop after each step, and its text form.

A StepResult is plain data. The loop executes it without further decisions, and tests compare
results without sockets and clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp._protocol.fields import NODES_MAX, SHARES
from hoplite_mp._protocol.messages import (
    ActorNameReport,
    Commit,
    Credentials,
    DeclaredDead,
    Distribute,
    ExecuteReduce,
    FetchRefused,
    Forget,
    GroupClosed,
    GroupJoined,
    GroupMemberRemoved,
    GroupMembers,
    GroupRefused,
    GroupTasksQuery,
    Leave,
    MembersChanged,
    NodeAdmitted,
    OperationFailed,
    OwnerReport,
    OwnersReassigned,
    PlansReported,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._planner.packing import PackingWanted
    from hoplite_mp._protocol.messages import ManagerToNode, Stripe

    Send: TypeAlias = tuple[int, ManagerToNode]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The actions to take now, in this order."""

    # Messages are sent to their nodes in this order, before any message of the next result. Nodes
    # rely on this order. For example, a node receives the members of a Group before the answer to a
    # join request, and the end of a Group before the next use of its board.
    sends: tuple[Send, ...] = ()
    # Call `tick` at this time, on the clock that is used for `now`. None: no call is needed. Each
    # result replaces the time of the previous result.
    wake_at: float | None = None
    # Pack these trees in the background, and pass each answer to `step` (`packing.pack` takes
    # milliseconds to seconds). If the answers are missing, transfers are slower but not incorrect.
    packing: tuple[PackingWanted, ...] = ()
    # The reasons for the plans, for the log.
    notes: tuple[str, ...] = ()

    def followed_by(self, later: StepResult) -> StepResult:
        """Combines this result with a later one."""
        return StepResult(
            self.sends + later.sends,
            later.wake_at,
            self.packing + later.packing,
            self.notes + later.notes,
        )

    def as_text(self) -> str:
        """Returns one line per message, and further lines for stripes. Tests compare this text with
        recorded scenarios."""
        lines: list[str] = []
        for node, message in self.sends:
            head, *rest = describe(message)
            lines.append(f"-> node {node}: {head}")
            lines.extend(f"     {line}" for line in rest)
        for wanted in self.packing:
            lines.append(f"pack trees over nodes {_numbers(wanted.nodes)}")
        for note in self.notes:
            lines.append(f"note: {note}")
        if self.wake_at is not None:
            lines.append(f"wake at {self.wake_at:g}")
        return "\n".join(lines) if lines else "nothing"


def describe(message: ManagerToNode) -> list[str]:
    """Describes a message from the manager in lines of readable text."""
    return _DRAWN[type(message)](message)


def _numbers(values: Iterable[int]) -> str:
    return " ".join(map(str, values))


def _ranks(mask: int) -> str:
    """The ranks in a bit mask, or `-` if there are none."""
    return _numbers(rank for rank in range(mask.bit_length()) if mask >> rank & 1) or "-"


def _stripes(stripes: Iterable[Stripe]) -> list[str]:
    lines = []
    for stripe in stripes:
        begin, end = stripe.begin_share / SHARES, stripe.end_share / SHARES
        lines.append(f"stripe  {begin:.2%} to {end:.2%} at node {stripe.owner}")
    return lines


def _execute(m: ExecuteReduce) -> list[str]:
    shape = "" if m.shape == "stripes" else f", {m.shape}"
    return [
        f"execute operation {m.operation}, epoch {m.epoch}: {m.kind}{shape}",
        f"members {_numbers(m.members)}",
        f"order   {_numbers(m.order)} ({m.rule})",
        f"from    {_numbers(m.holders)} to {_numbers(m.destinations)}",
        *_stripes(m.stripes),
    ]


def _distribute(m: Distribute) -> list[str]:
    lines = [
        f"distribute {_object(m.object)}, epoch {m.epoch}: {m.nbytes} bytes, {m.rule}",
        f"from    {_numbers(m.sources) or '-'} to {_numbers(m.receivers)}",
        *_stripes(m.stripes),
    ]
    return lines + [f"parents {_numbers(row)}" for row in m.parents]


def _withdraw(m: Withdraw) -> list[str]:
    return [f"withdraw {_object(m.object)}, epoch {m.epoch}"]


def _refused_fetch(m: FetchRefused) -> list[str]:
    return [f"fetch of {_object(m.object)} refused, {m.error}: {m.message}"]


def _owners_reassigned(m: OwnersReassigned) -> list[str]:
    found = zip(m.objects, m.owners, strict=True)
    at = [(_object(one), "none" if owner == NODES_MAX else f"node {owner}") for one, owner in found]
    return [f"owners after node {m.lost}", *(f"{one} at {owner}" for one, owner in at)]


def _owner_report(m: OwnerReport) -> list[str]:
    owner = "none" if m.owner == NODES_MAX else f"node {m.owner}"
    return [f"owner of {_object(m.object)}: {owner}"]


def _object(object_id: bytes) -> str:
    """The first digits of an object's id, which suffice to distinguish objects."""
    return f"object {object_id.hex()[:8]}"


def _credentials(m: Credentials) -> list[str]:
    return [f"credentials of {len(m.pem)} bytes"]


def _admitted(m: NodeAdmitted) -> list[str]:
    nodes = _numbers(member.node for member in m.members)
    return [f"admitted as node {m.node}, incarnation {m.incarnation}; nodes {nodes}"]


def _changed(m: MembersChanged) -> list[str]:
    added = _numbers(member.node for member in m.added) or "-"
    return [f"nodes removed: {_numbers(m.removed) or '-'}, added: {added}"]


def _leave(m: Leave) -> list[str]:
    return [f"node {m.node}, incarnation {m.incarnation}, may leave"]


def _commit(m: Commit) -> list[str]:
    of = f"operation {m.operation}, epoch {m.epoch}"
    return [f"commit {of}: contributors {_numbers(m.contributors)}"]


def _failed(m: OperationFailed) -> list[str]:
    cause = "" if m.cause_index is None else f" (source {m.cause_index})"
    return [f"operation {m.operation} failed, {m.error}{cause}: {m.message}"]


def _forget(m: Forget) -> list[str]:
    return [f"forget operation {m.operation}"]


def _members(m: GroupMembers) -> list[str]:
    phase = "formed" if m.formed else "forming"
    masks = f"alive {_ranks(m.alive)}, joining {_ranks(m.joining)}"
    head = f"board {m.board} = {m.name!r} #{m.generation}, size {m.size}, {phase}: {masks}"
    if len(set(m.nodes) - {None}) == 1:
        return [head]
    places = " ".join("-" if node is None else str(node) for node in m.nodes)
    return [head, f"version {m.version}, nodes of ranks {places}", *_stripes(m.stripes)]


def _joined(m: GroupJoined) -> list[str]:
    state = "member" if m.admitted else "joining"
    return [f"request {m.request}: rank {m.rank} of {m.name!r} #{m.generation}, {state}"]


def _refused(m: GroupRefused) -> list[str]:
    return [f"request {m.request} refused, {m.error}: {m.message}"]


def _closed(m: GroupClosed) -> list[str]:
    return [f"board {m.board}: {m.name!r} #{m.generation} is closed"]


def _tasks_query(m: GroupTasksQuery) -> list[str]:
    return [f"report the end of these tasks: {' '.join(map(_object, m.tasks))}"]


def _member_removed(m: GroupMemberRemoved) -> list[str]:
    return [f"board {m.board}: rank {m.rank} of {m.name!r} #{m.generation} is removed"]


def _name_report(m: ActorNameReport) -> list[str]:
    owner = "none" if m.identity is None else _object(m.identity)
    return [f"request {m.request}: owner of {m.name!r}: {owner}"]


def _plans_report(m: PlansReported) -> list[str]:
    rows = [f"{one.kind} by {one.shape or 'no plan'}, {one.state}" for one in m.plans]
    return [f"request {m.request}: {len(rows)} plans", *rows]


# The parameters are not typed, because each function accepts only the message type of its key.
_DRAWN: dict[type, Callable[..., list[str]]] = {
    Credentials: _credentials,
    NodeAdmitted: _admitted,
    MembersChanged: _changed,
    DeclaredDead: lambda m: [f"declared dead after a silence of {m.silent_s:.1f} s"],
    Leave: _leave,
    Distribute: _distribute,
    Withdraw: _withdraw,
    FetchRefused: _refused_fetch,
    OwnersReassigned: _owners_reassigned,
    OwnerReport: _owner_report,
    ExecuteReduce: _execute,
    Commit: _commit,
    OperationFailed: _failed,
    Forget: _forget,
    GroupMembers: _members,
    GroupJoined: _joined,
    GroupRefused: _refused,
    GroupClosed: _closed,
    GroupTasksQuery: _tasks_query,
    GroupMemberRemoved: _member_removed,
    ActorNameReport: _name_report,
    PlansReported: _plans_report,
}
