"""Messages about Groups: their members, and the masks on a group's board.

A member is identified by (node, client slot, generation of the slot). A group is *formed* once all
its ranks have joined. Before that, a leaving member frees its rank. Afterwards, a new member with a
free rank is *joining* until its node reports that the living members have admitted it.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.fields import (
    GROUP_ERRORS,
    NAME_CHARS_MAX,
    NODES_MAX,
    NUMBER_MAX,
    RANKS_MAX,
    TEXT_CHARS_MAX,
    Message,
    Stripe,
    between,
    counts,
    flags,
    numbers,
    one_of,
    text,
    whole_object,
)

NO_TASK = b""  # the task of a member that is a driver's thread
ASKED_MAX = 1 << 12  # tasks in one GroupTasksQuery


Founder: TypeAlias = tuple[int, int, int, int]
# One run of a task: (node, client, client_generation) of its process, and the number of earlier
# runs (tries).
TaskRun: TypeAlias = tuple[int, int, int, int]


def _founders(founders: tuple[Founder, ...]) -> None:
    if not isinstance(founders, tuple):
        raise ValueError(f"founders must be a tuple, not {founders!r}")
    between("number of founders", len(founders), 0, RANKS_MAX)
    for founder in founders:
        if not isinstance(founder, tuple) or len(founder) != 4:
            raise ValueError(f"founders: not (rank, node, client, generation): {founder!r}")
        rank, node, client, generation = founder
        between("founder's rank", rank, 0, RANKS_MAX - 1)
        counts(node=node, client=client, client_generation=generation)


def _tasks(name: str, tasks: tuple[bytes, ...], count_max: int) -> None:
    if not isinstance(tasks, tuple):
        raise ValueError(f"{name} must be a tuple, not {tasks!r}")
    between(f"number of {name}", len(tasks), 0, count_max)
    for task in tasks:
        if not isinstance(task, bytes) or len(task) not in (0, ID_BYTES):
            raise ValueError(f"{name}: not a task id: {task!r}")


def _holders(holders: tuple[tuple[bytes, bytes], ...], size: int) -> None:
    if not isinstance(holders, tuple) or len(holders) not in (0, size):
        raise ValueError(f"holders must have one item per rank, {size} ranks: {holders!r}")
    for holder in holders:
        if not isinstance(holder, tuple) or len(holder) != 2:
            raise ValueError(f"holders: not (task, team): {holder!r}")
        _tasks("holder", holder, 2)


def _runs(runs: tuple[TaskRun, ...], count: int) -> None:
    if not isinstance(runs, tuple) or len(runs) != count:
        raise ValueError(f"runs must have one item per task, {count} tasks: {runs!r}")
    for run in runs:
        if not isinstance(run, tuple) or len(run) != 4:
            raise ValueError(f"runs: not (node, client, generation, tries): {run!r}")
        node, client, generation, tries = run
        counts(node=node, client=client, client_generation=generation, tries=tries)


class GroupEnd(Message, frozen=True, tag="GroupEnd"):
    """A Group that has ended; retries of its members' tasks may request it again. `tasks`: the
    tasks of all its members; `runs`: for each, the last run that was a member; `dead`: the tasks
    that died without leaving. `open`: a thread of a driver was also a member, and may use the name
    again at any time."""

    name: str
    generation: int
    dead: tuple[bytes, ...]
    tasks: tuple[bytes, ...]
    runs: tuple[TaskRun, ...]
    open: bool = False

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation)
        _tasks("dead", self.dead, 2 * RANKS_MAX)
        _tasks("tasks", self.tasks, 2 * RANKS_MAX)
        _runs(self.runs, len(self.tasks))
        flags(open=self.open)


# ---- node -> manager


class GroupJoinRequested(Message, frozen=True, tag="GroupJoinRequested"):
    """A client calls `group(name, size, rank)`; `request` is the node's number for the call.

    `rank` None: the lowest free rank. `members_max`: the number of ranks on a board of the node.
    `task`: the id of the caller's task, the same for all retries. `tries`: the number of earlier
    runs. `founders`: for a group split from the group of generation `parent`, the process that is
    assigned each rank, as (rank in the parent, node, client, client_generation). The group waits
    only for these processes, except those that have left the parent.
    `team`: the id of the caller's `spmd` call, if the group has a rank for each peer in that call.
    Otherwise NO_TASK, because the peers may use one name for several smaller groups.
    """

    request: int
    node: int
    client: int
    client_generation: int
    name: str
    size: int
    rank: int | None = None
    members_max: int = RANKS_MAX
    task: bytes = NO_TASK
    parent: int = 0
    founders: tuple[Founder, ...] = ()
    tries: int = 0
    team: bytes = NO_TASK

    def __post_init__(self) -> None:
        _tasks("task", (self.task,), 1)
        _tasks("team", (self.team,), 1)
        counts(parent=self.parent, tries=self.tries)
        _founders(self.founders)
        counts(request=self.request, node=self.node, client=self.client)
        counts(client_generation=self.client_generation)
        text("name", self.name, NAME_CHARS_MAX)
        # The user chooses size and rank. Illegal values are answered by GroupRefused, whose text
        # can include the group's size.
        between("size", self.size, -NUMBER_MAX, NUMBER_MAX)
        if self.rank is not None:
            between("rank", self.rank, -NUMBER_MAX, NUMBER_MAX)
        between("members_max", self.members_max, 1, RANKS_MAX)


class GroupAdmitted(Message, frozen=True, tag="GroupAdmitted"):
    """The living members have admitted the joining member with this rank, at a commit."""

    name: str
    generation: int
    rank: int

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation)
        between("rank", self.rank, 0, RANKS_MAX - 1)


class GroupLeft(Message, frozen=True, tag="GroupLeft"):
    """A member closed its Group. (ClientLost reports a death, for all groups.)"""

    name: str
    generation: int
    rank: int
    node: int
    client: int
    client_generation: int

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation, node=self.node, client=self.client)
        counts(client_generation=self.client_generation)
        between("rank", self.rank, 0, RANKS_MAX - 1)


class GroupTasksEnded(Message, frozen=True, tag="GroupTasksOver"):
    """These tasks of a GroupTasksQuery have finished, failed or been cancelled, without a retry."""

    node: int
    tasks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        counts(node=self.node)
        _tasks("tasks", self.tasks, ASKED_MAX)


# ---- manager -> node


class GroupTasksQuery(Message, frozen=True, tag="GroupTasksAsked"):
    """Requests a report (GroupTasksEnded) when these tasks, submitted on the node's host, have
    ended. Members of a Group are waiting until these tasks join, and must stop waiting for tasks
    that have ended."""

    tasks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _tasks("tasks", self.tasks, ASKED_MAX)


class GroupMemberRemoved(Message, frozen=True, tag="GroupGivenUp"):
    """Removes a member, because its group can never be formed, or has continued without the
    member's host. `message`: the reason, for the user."""

    name: str
    generation: int
    board: int
    rank: int
    client: int
    client_generation: int
    message: str

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        text("message", self.message, TEXT_CHARS_MAX)
        counts(generation=self.generation, board=self.board, client=self.client)
        counts(client_generation=self.client_generation)
        between("rank", self.rank, 0, RANKS_MAX - 1)


class GroupMembers(Message, frozen=True, tag="GroupMembers"):
    """The new contents of the board; sent at every change, before GroupJoined.

    The first message of a generation also creates the board. `version` counts the messages of one
    generation, from 1. `nodes[rank]` is the node of that rank's member, None for a free rank. The
    leader of a call is the lowest living rank; its node leads.

    `former`: nodes that had members, but have none now. They may be the only nodes that know
    certain decisions, so nothing is decided before they have reported. `first`: this message
    forms the group, and its members begin with call 0.

    `stripes` are the owners of the stripes of large calls, with shares proportional to the rates of
    their links. They are valid until the next message, so calls need no manager. One stripe: all
    living members are on one node.

    `since`: for each rank, the first version with its current member; 0 for a free rank. Messages
    under earlier versions were for the rank's previous member. A node may have missed that first
    version if the manager died early. `whole`: the first version in which the group is formed, else
    0; members of that or an earlier version begin with call 0.

    The other fields are for the next manager: the members' `tasks` and their `tries` by rank;
    `past`, the record of the group if it ended now; whether any member has `left` rather than died;
    `parent` and `founders` as in GroupJoinRequested; a mask of the founders that have joined
    (`founders_joined`); and, until the group is formed, `holders`: by rank, the (task, team) of the
    last member, even if it has left.
    """

    name: str
    generation: int
    board: int
    size: int
    alive: int
    joining: int
    formed: bool
    version: int
    nodes: tuple[int | None, ...]
    stripes: tuple[Stripe, ...]
    former: tuple[int, ...] = ()
    first: bool = False
    tasks: tuple[bytes, ...] = ()
    past: GroupEnd | None = None
    left: bool = False
    parent: int = 0
    founders: tuple[Founder, ...] = ()
    founders_joined: int = 0
    tries: tuple[int, ...] = ()
    since: tuple[int, ...] = ()
    whole: int = 0
    holders: tuple[tuple[bytes, bytes], ...] = ()

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation, board=self.board, version=self.version)
        _holders(self.holders, self.size)
        counts(parent=self.parent, founders_joined=self.founders_joined, whole=self.whole)
        _founders(self.founders)
        between("size", self.size, 1, RANKS_MAX)
        _tasks("tasks", self.tasks, self.size)
        numbers("tries", self.tries, NUMBER_MAX)
        numbers("since", self.since, NUMBER_MAX)
        between("alive", self.alive, 0, (1 << self.size) - 1)
        between("joining", self.joining, 0, (1 << self.size) - 1)
        if self.alive & self.joining:
            raise ValueError(f"alive {self.alive:b} and joining {self.joining:b} share a rank")
        flags(formed=self.formed, first=self.first, left=self.left)
        whole_object("stripes", self.stripes)
        if not isinstance(self.nodes, tuple) or len(self.nodes) != self.size:
            raise ValueError(f"nodes must have one item per rank, {self.size}: {self.nodes!r}")
        for rank, node in enumerate(self.nodes):
            held = (self.alive | self.joining) >> rank & 1
            if held:
                between(f"nodes[{rank}]", node, 0, NODES_MAX - 1)
            elif node is not None:
                raise ValueError(f"nodes[{rank}] must be None because the rank is free: {node!r}")

    def since_of(self, rank: int) -> int:
        """The first version with the current member of the rank."""
        return self.since[rank] if rank < len(self.since) else self.version

    @property
    def leader(self) -> int | None:
        """The lowest living rank; None if no member is alive."""
        return (self.alive & -self.alive).bit_length() - 1 if self.alive else None


class GroupJoined(Message, frozen=True, tag="GroupJoined"):
    """The answer to a join: rank and board. If `admitted` is False, the member is joining until a
    later GroupMembers admits it."""

    request: int
    name: str
    generation: int
    rank: int
    size: int
    board: int
    formed: bool
    admitted: bool

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(request=self.request, generation=self.generation, board=self.board)
        between("size", self.size, 1, RANKS_MAX)
        between("rank", self.rank, 0, self.size - 1)
        flags(formed=self.formed, admitted=self.admitted)


class GroupRefused(Message, frozen=True, tag="GroupRefused"):
    """A join was refused; `message` is for the user."""

    request: int
    message: str
    error: str = "value"

    def __post_init__(self) -> None:
        counts(request=self.request)
        text("message", self.message, TEXT_CHARS_MAX)
        one_of("error", self.error, GROUP_ERRORS)


class GroupClosed(Message, frozen=True, tag="GroupClosed"):
    """All members are gone. The name is free; a node's board is free once the node has received
    this message."""

    name: str
    generation: int
    board: int
    end: GroupEnd | None = None  # for the next manager

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation, board=self.board)
