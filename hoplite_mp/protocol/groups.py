"""The messages about Groups: who is a member, and which masks stand on a group's board.

A member is (node, client slot, generation of the slot). A group is *formed* when all its ranks
have joined for the first time. Before that, who leaves frees its rank; afterwards a newcomer with
a free rank is *joining* until its node reports that the living have admitted it.

This module must never know what members say to each other: that is shared memory, not messages.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp.ids import ID_BYTES
from hoplite_mp.protocol.fields import (
    GROUP_ERRORS,
    NAME_CHARS_MAX,
    NODES_MAX,
    NUMBER_MAX,
    RANKS_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    flags,
    numbers,
    one_of,
    text,
)
from hoplite_mp.protocol.stripes import Stripe, whole_object

NO_TASK = b""  # of a member that is no task: a thread of a driver
ASKED_MAX = 1 << 12  # tasks in one GroupTasksAsked


Founder: TypeAlias = tuple[int, int, int, int]
# One run of a task: (node, client, client_generation) of its process, and how often the task had
# been tried before. The same task has another run when it is tried again.
Run: TypeAlias = tuple[int, int, int, int]


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
            raise ValueError(f"{name}: no id of a task: {task!r}")


def _runs(runs: tuple[Run, ...], count: int) -> None:
    if not isinstance(runs, tuple) or len(runs) != count:
        raise ValueError(f"runs must be one for each of {count} tasks: {runs!r}")
    for run in runs:
        if not isinstance(run, tuple) or len(run) != 4:
            raise ValueError(f"runs: not (node, client, generation, tries): {run!r}")
        node, client, generation, tries = run
        counts(node=node, client=client, client_generation=generation, tries=tries)


class GroupEnd(Message, frozen=True):
    """A Group that is over although tasks that were members, and are tried again, may ask for it
    again. `tasks`: of all its members, `runs`: in which each of them was a member last, `dead`:
    those that have not left, but died. `open`: somebody else was a member, too, a thread of a
    driver, who may use the name again at any time."""

    name: str
    generation: int
    dead: tuple[bytes, ...]
    tasks: tuple[bytes, ...]
    runs: tuple[Run, ...]
    open: bool = False

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation)
        _tasks("dead", self.dead, 2 * RANKS_MAX)
        _tasks("tasks", self.tasks, 2 * RANKS_MAX)
        _runs(self.runs, len(self.tasks))
        flags(open=self.open)


# ---- node -> manager


class GroupJoinRequested(Message, frozen=True):
    """A client calls `group(name, size, rank)`; `request` is the node's own number for the call.

    `rank` None: the lowest free one. `members_max`: how many ranks a board of that node holds.
    `task`: the id of the task that the caller runs in, the same when it is tried again. `tries`:
    how often it had been tried before.
    `founders`: of a group that comes out of another one, whose generation is `parent`: who gets
    which rank, as (rank in that one, node, client, client_generation). Nobody else is waited for,
    and a founder who is no member of that one any more has had his chance.
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

    def __post_init__(self) -> None:
        _tasks("task", (self.task,), 1)
        counts(parent=self.parent, tries=self.tries)
        _founders(self.founders)
        counts(request=self.request, node=self.node, client=self.client)
        counts(client_generation=self.client_generation)
        text("name", self.name, NAME_CHARS_MAX)
        # Size and rank are the user's: what is wrong with them is answered by GroupRefused, so
        # that it can name the group's own size.
        between("size", self.size, -NUMBER_MAX, NUMBER_MAX)
        if self.rank is not None:
            between("rank", self.rank, -NUMBER_MAX, NUMBER_MAX)
        between("members_max", self.members_max, 1, RANKS_MAX)


class GroupAdmitted(Message, frozen=True):
    """The living members have taken in the joining member of that rank, at a commit."""

    name: str
    generation: int
    rank: int

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation)
        between("rank", self.rank, 0, RANKS_MAX - 1)


class GroupLeft(Message, frozen=True):
    """A member closed its Group. (Who dies is reported by ClientLost, for all its groups.)"""

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


class GroupTasksOver(Message, frozen=True):
    """These tasks, for which GroupTasksAsked has asked that node, are over: finished, failed or
    cancelled, and not tried again."""

    node: int
    tasks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        counts(node=self.node)
        _tasks("tasks", self.tasks, ASKED_MAX)


# ---- manager -> node


class GroupTasksAsked(Message, frozen=True):
    """The node says when each of these tasks is over, of those that are at once. Their submitters
    are processes of its host. A member of a Group waits for them that would wait in vain then."""

    tasks: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _tasks("tasks", self.tasks, ASKED_MAX)


class GroupGivenUp(Message, frozen=True):
    """That member waits for others in a group that can never be whole: it is none any more, and
    the user is told why."""

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


class GroupMembers(Message, frozen=True):
    """What the board must show from now on; sent at every change, before GroupJoined.

    The first one of a generation is also the order to make the board. `version` counts these
    messages of one generation, from 1. `nodes[rank]` is where the member of that rank lives, None
    for a rank that nobody holds. The leader of a call is the lowest living rank; its node leads.
    `former`: nodes that have no member any more. What was decided while they had one they may be
    the only ones to know, so nothing is decided before they have been heard. `first`: this
    message says that the group is whole; whoever is in it begins with call 0.
    `stripes` are the owners of large calls, in shares by their links: the same for all calls until
    the next message, so that no call asks the manager. One stripe: all living are on one node.
    For the next manager: the members' `tasks` and their `tries` by rank, `past`, what it would
    remember of the group if this were its end, whether any member has `left` rather than died,
    `parent` and `founders` as in GroupJoinRequested, and which founders have `come`, as bits.
    `since`: the version that was the first to show the member of each rank, 0 for a rank that
    nobody holds. Messages of earlier versions were for the member before it, and a node may miss
    the version itself, because the manager dies before it has told everybody.
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
    come: int = 0
    tries: tuple[int, ...] = ()
    since: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation, board=self.board, version=self.version)
        counts(parent=self.parent, come=self.come)
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
            raise ValueError(f"nodes must be one for each of {self.size} ranks: {self.nodes!r}")
        for rank, node in enumerate(self.nodes):
            held = (self.alive | self.joining) >> rank & 1
            if held:
                between(f"nodes[{rank}]", node, 0, NODES_MAX - 1)
            elif node is not None:
                raise ValueError(f"nodes[{rank}] must be None, nobody holds that rank: {node!r}")

    def since_of(self, rank: int) -> int:
        """The version that was the first to show who holds that rank."""
        return self.since[rank] if rank < len(self.since) else self.version

    @property
    def leader(self) -> int | None:
        """The lowest living rank; None while nobody counts."""
        return (self.alive & -self.alive).bit_length() - 1 if self.alive else None


class GroupJoined(Message, frozen=True):
    """The answer to a join: rank and board. Not `admitted`: joining, GroupMembers will tell."""

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


class GroupRefused(Message, frozen=True):
    """The other answer to a join, for the user to read."""

    request: int
    message: str
    error: str = "value"

    def __post_init__(self) -> None:
        counts(request=self.request)
        text("message", self.message, TEXT_CHARS_MAX)
        one_of("error", self.error, GROUP_ERRORS)


class GroupClosed(Message, frozen=True):
    """All have left: the name is free, and the board too once this has been read."""

    name: str
    generation: int
    board: int
    end: GroupEnd | None = None  # for the next manager

    def __post_init__(self) -> None:
        text("name", self.name, NAME_CHARS_MAX)
        counts(generation=self.generation, board=self.board)
