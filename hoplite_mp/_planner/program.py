"""One node's program for a plan: its pulls, folds and serves.

A plan consists of members, owners and shares, and is the same for all nodes. From the plan, each
node derives the nodes to which it sends and from which it receives, in terms of **cells**. A cell
is a range of memory with a watermark, and is identified by

    Cell(stripe, part, node)     "part `part` of stripe `stripe`, on node `node`"

Other nodes request the cell from `node` by the key (operation, epoch, stripe, part). Pulls match
serves, because both nodes derive them from the same message.

    part RESULT         the stripe of a copied object, or of a finished fold
    part CONTRIBUTION   the fold of a node's own members, followed by the contributions of its
                        subtree; on the node that finishes a stripe (`finisher`), the finished
                        stripe
    part MEMBER + k     only the k-th member in folding order, for folds that must not be regrouped

A cell is filled by a pull or a fold, or is full from the start (`Program.given`, the members on
this node). All cells follow one rule: a block is moved or folded as soon as the watermarks of its
inputs have passed the block. A fold with one source is an alias of this source, so nothing is
copied. For kinds that copy, "stripe" k is the entire k-th member.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._protocol.fields import FOLDING, SHARES
from hoplite_mp._protocol.messages import Distribute, ExecuteReduce

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

    from hoplite_mp._protocol.messages import ExecuteReduce


RESULT = 0
CONTRIBUTION = 1
MEMBER = 2

# Maximum number of simultaneous pulls by a node, in kinds that copy many objects. Each object may
# have a different parent. Higher: more senders share one switch port, which then drops frames
# (incast). Lower: a slow parent delays more of the other transfers.
INBOUND_PARENTS_MAX = 4
# Maximum number of cells of a reduce_scatter on one node: the number of slices times the number of
# members on the node. Higher: larger calls are possible. Lower: the node, which makes 100 000 cells
# per second, is blocked for less time.
REDUCE_SCATTER_PARTS_MAX = 1 << 18
PROGRAMS_MAX = 32


class Cell(NamedTuple):
    """The name of a cell within a plan. Requests from other nodes add the operation and epoch."""

    stripe: int
    part: int
    node: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Fills a cell from the node that provides it. The shares are a range of the object."""

    cell: Cell
    begin_share: int
    end_share: int

    @property
    def parent(self) -> int:
        """The node that provides the cell."""
        return self.cell.node


@dataclass(frozen=True, slots=True)
class Fold:
    """Folds `sources` into `cell`, from left to right, block by block."""

    cell: Cell
    sources: tuple[Cell, ...]
    begin_share: int
    end_share: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Sends a cell to every node that requests it, as far as the cell is filled."""

    cell: Cell
    begin_share: int
    end_share: int


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of one node for one plan."""

    node: int
    pulls: tuple[Pull, ...] = ()  # started in this order
    folds: tuple[Fold, ...] = ()
    serves: tuple[Serve, ...] = ()
    # The members on this node: (cell, index into the request's sources).
    given: tuple[tuple[Cell, int], ...] = ()
    # The cells that together form the copy or the result that this node receives.
    result: tuple[Cell, ...] = ()
    inbound_max: int = 0  # maximum number of simultaneous pulls; 0: no limit
    reports: bool = False  # sends StripesComplete (or FetchComplete) when all its cells are full

    @property
    def is_empty(self) -> bool:
        """Whether this node takes no part in the plan and sends no report about it."""
        return not (self.pulls or self.folds or self.serves or self.result or self.reports)


def program_of(plan: Distribute | ExecuteReduce, node: int) -> Program:
    """Returns the program of `node` for this plan. It is empty if the node takes no part."""
    if isinstance(plan, Distribute):
        return _distribute(plan, node)
    if plan.kind not in FOLDING:
        return _copies(plan, node)
    if plan.shape != "stripes":
        return _tree(plan, node)
    return _stripes(plan, node)


class ProgramCache:
    """A cache of programs, for repeated calls whose plans differ only in their ids."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Program] = {}

    def of(self, plan: Distribute | ExecuteReduce, node: int) -> Program:
        """Like `program_of`."""
        key: Hashable
        if isinstance(plan, Distribute):
            key = node, plan.rule, plan.sources, plan.receivers, plan.stripes, plan.parents
        else:
            key = (
                node,
                plan.kind,
                plan.rule,
                plan.shape,
                plan.stripes,
                plan.members,
                plan.order,
                plan.holders,
                plan.destinations,
            )
        known = self._known.get(key)
        if known is None:
            while len(self._known) >= PROGRAMS_MAX:
                del self._known[next(iter(self._known))]
            known = self._known[key] = program_of(plan, node)
        return known


def participants(plan: Distribute | ExecuteReduce) -> list[int]:
    """All nodes that must receive the plan, without duplicates."""
    if isinstance(plan, Distribute):
        rows = (node for row in plan.parents for node in row)
        owners = [stripe.owner for stripe in plan.stripes]
        if plan.rule == "stripes":
            receivers, count = set(plan.receivers), len(plan.sources)
            # A source of several stripes is listed once.
            feeding: list[int] = []
            for index, stripe in enumerate(plan.stripes):
                if len(feeding) == count:
                    break
                source = plan.sources[index % count] if stripe.owner in receivers else None
                if source is not None and source not in feeding:
                    feeding.append(source)
            return list(dict.fromkeys((*feeding, *plan.receivers, *owners)))
        return list(dict.fromkeys((*plan.sources[:1], *plan.receivers, *rows)))
    owners = [stripe.owner for stripe in plan.stripes]
    return list(dict.fromkeys((*plan.holders, *plan.destinations, *owners)))


def waits_for(plan: Distribute | ExecuteReduce) -> set[int]:
    """The nodes that must report before the plan is complete."""
    if isinstance(plan, Distribute):
        return set(plan.receivers)
    return {*plan.destinations, *[stripe.owner for stripe in plan.stripes]}


def too_many_parts(kind: str, holders: Collection[int], destinations: Sequence[int]) -> str:
    """The reason if a reduce_scatter needs too many cells on a node, otherwise "". No cells are
    needed if there is only one node."""
    if kind != "reduce_scatter" or len({*holders, *destinations}) == 1:
        return ""
    node, held = Counter(holders).most_common(1)[0]
    parts = held * len(destinations)
    if parts <= REDUCE_SCATTER_PARTS_MAX:
        return ""
    return (
        f"reduce_scatter into {len(destinations)} slices over several hosts: node h{node} holds "
        f"{held} of the sources, which makes {parts} parts, but a node can have at most "
        f"{REDUCE_SCATTER_PARTS_MAX} (REDUCE_SCATTER_PARTS_MAX); reduce() the refs and cut the "
        "result, or call reduce_scatter() with fewer refs"
    )


def tree_parent(position: int, degree: int) -> int:
    """The parent of position `position` (at least 1) in a tree that is filled level by level."""
    return (position - 1) // degree


def tree_children(position: int, degree: int, count: int) -> range:
    """The children of position `position` in a tree with `count` positions."""
    first = degree * position + 1
    return range(min(first, count), min(first + degree, count))


# ---- copies of one object


def _distribute(plan: Distribute, node: int) -> Program:
    pulls: list[Pull] = []
    folds: list[Fold] = []
    serves: list[Serve] = []
    place = plan.receivers.index(node) if node in plan.receivers else None
    for index, stripe in enumerate(plan.stripes):
        cell = Cell(index, RESULT, node)
        begin, end = stripe.begin_share, stripe.end_share
        parent, feeds = _edges(plan, index, node, place)
        if parent is not None:
            pulls.append(Pull(cell._replace(node=parent), begin, end))
            if feeds:
                folds.append(Fold(cell, (pulls[-1].cell,), begin, end))
        if feeds:
            serves.append(Serve(cell, begin, end))
    return Program(
        node,
        pulls=_rotated(pulls, node),
        folds=tuple(folds),
        serves=tuple(serves),
        result=tuple(pull.cell for pull in pulls),
        reports=place is not None,
    )


def _edges(plan: Distribute, index: int, node: int, place: int | None) -> tuple[int | None, bool]:
    """Returns the node from which `node` receives this stripe, and whether `node` sends the stripe
    to other nodes. `place`: the index of `node` among the receivers."""
    owner = plan.stripes[index].owner
    if plan.rule == "parents":
        row = plan.parents[index]
        return (None if place is None else row[place]), node in row
    if plan.rule != "stripes":
        degree = int(plan.rule.removeprefix("tree:"))
        if place is None:
            return None, node == plan.sources[0]
        above = tree_parent(place + 1, degree)
        parent = plan.sources[0] if above == 0 else plan.receivers[above - 1]
        return parent, bool(tree_children(place + 1, degree, len(plan.receivers) + 1))
    if owner == node:
        if place is None:
            return None, True
        return plan.sources[index % len(plan.sources)], len(plan.receivers) > 1
    if place is not None:
        return owner, False
    feeds = bool(plan.sources) and plan.sources[index % len(plan.sources)] == node
    return None, feeds and owner in plan.receivers


def _rotated(pulls: Sequence[Pull], node: int) -> tuple[Pull, ...]:
    """Rotates the pulls so that each node begins with a different parent."""
    first = next((i for i, pull in enumerate(pulls) if pull.parent > node), 0)
    return (*pulls[first:], *pulls[:first])


# ---- copies of many objects


def _copies(plan: ExecuteReduce, node: int) -> Program:
    pulls: list[Pull] = []
    serves: list[Serve] = []
    result: list[Cell] = []
    given: list[tuple[Cell, int]] = []
    wanted_by = set(plan.destinations)
    for index, (member, holder) in enumerate(zip(plan.members, plan.holders, strict=True)):
        receivers = wanted_by
        if plan.kind == "alltoall":
            receivers = {plan.destinations[member % len(plan.destinations)]}
        cell = Cell(index, RESULT, holder)
        if holder == node:
            given.append((cell, member))
            if receivers != {node}:
                serves.append(Serve(cell, 0, SHARES))
        elif node in receivers:
            pulls.append(Pull(cell, 0, SHARES))
        if node in receivers:
            result.append(cell)
    ordered = sorted(pulls, key=lambda pull: (pull.parent <= node, pull.parent, pull.cell.stripe))
    return Program(
        node,
        pulls=tuple(ordered),
        serves=tuple(serves),
        given=tuple(given),
        result=tuple(result),
        inbound_max=INBOUND_PARENTS_MAX,
        reports=node in wanted_by,
    )


# ---- folds


def _own_members(plan: ExecuteReduce, node: int) -> list[tuple[int, int]]:
    """Returns (place in the folding order, index of the source) for each member on this node."""
    holder_of = dict(zip(plan.members, plan.holders, strict=True))
    return [(k, index) for k, index in enumerate(plan.order) if holder_of[index] == node]


def _arrivals(plan: ExecuteReduce) -> list[int]:
    """The contributing nodes in the order in which their first members became ready."""
    holder_of = dict(zip(plan.members, plan.holders, strict=True))
    return list(dict.fromkeys(holder_of[index] for index in plan.order))


class _Builder:
    """Collects the cells of one node's fold."""

    def __init__(self, plan: ExecuteReduce, node: int) -> None:
        self.plan = plan
        self.node = node
        self.members = _own_members(plan, node)
        self._own: dict[int, tuple[Cell, ...]] = {}
        self.pulls: list[Pull] = []
        self.folds: list[Fold] = []
        self.serves: list[Serve] = []
        self.result: list[Cell] = []

    def own(self, index: int) -> tuple[Cell, ...]:
        """The node's own members of a stripe, in folding order."""
        if index not in self._own:
            self._own[index] = tuple(Cell(index, MEMBER + k, self.node) for k, _ in self.members)
        return self._own[index]

    def fold(self, index: int, part: int, sources: Iterable[Cell]) -> Cell:
        """Adds a fold of the sources into a new cell, and pulls of the sources on other nodes."""
        stripe = self.plan.stripes[index]
        cell = Cell(index, part, self.node)
        cells = tuple(sources)
        begin, end = stripe.begin_share, stripe.end_share
        self.pull(index, *(source for source in cells if source.node != self.node))
        self.folds.append(Fold(cell, cells, begin, end))
        return cell

    def pull(self, index: int, *cells: Cell) -> None:
        stripe = self.plan.stripes[index]
        self.pulls += [Pull(cell, stripe.begin_share, stripe.end_share) for cell in cells]

    def serve(self, index: int, *cells: Cell) -> None:
        stripe = self.plan.stripes[index]
        self.serves += [Serve(cell, stripe.begin_share, stripe.end_share) for cell in cells]

    def program(self) -> Program:
        return Program(
            self.node,
            pulls=_rotated(self.pulls, self.node),
            folds=tuple(self.folds),
            serves=tuple(self.serves),
            given=tuple(
                (cell, index)
                for stripe in range(len(self.plan.stripes))
                for cell, (_, index) in zip(self.own(stripe), self.members, strict=True)
            ),
            result=tuple(self.result),
            reports=self.node in waits_for(self.plan),
        )


def _stripes(plan: ExecuteReduce, node: int) -> Program:
    build = _Builder(plan, node)
    arrivals = _arrivals(plan)
    holder_of = dict(zip(plan.members, plan.holders, strict=True))
    ordered = plan.rule == "fold"
    for index, stripe in enumerate(plan.stripes):
        owner = stripe.owner
        destinations = plan.destinations
        if plan.kind == "reduce_scatter":
            destinations = (owner,)
        last = finisher(plan, index)
        if node == owner:
            if ordered:
                cells = [Cell(index, MEMBER + k, holder_of[m]) for k, m in enumerate(plan.order)]
            else:
                cells = _fold_sources(build, index, [n for n in arrivals if n != last])
            made = build.fold(index, RESULT, cells)
            if any(other != owner for other in destinations):
                build.serve(index, made)
            if node in destinations:
                build.result.append(made)
            continue
        own = build.own(index)
        if own and node != last:
            if ordered:
                build.serve(index, *own)
            else:
                build.serve(index, build.fold(index, CONTRIBUTION, own))
        if node == last:
            build.result.append(build.fold(index, CONTRIBUTION, (Cell(index, RESULT, owner), *own)))
        elif node in destinations:
            build.pull(index, Cell(index, RESULT, owner))
            build.result.append(Cell(index, RESULT, owner))
    return build.program()


def finisher(plan: ExecuteReduce, index: int) -> int | None:
    """The node that adds the last members to a stripe after the fold by the stripe's owner. None if
    the owner itself completes the stripe.

    The finisher is the only destination of a reduction. It adds its own members last, so that they
    need not be sent.
    """
    if plan.kind != "reduce" or plan.rule == "fold" or plan.shape != "stripes":
        return None
    last = plan.destinations[0]
    if last == plan.stripes[index].owner or last not in plan.holders or len(set(plan.holders)) == 1:
        return None
    return last


def members_in(plan: ExecuteReduce, cell: Cell) -> int:
    """The number of members that the plan folds into a cell."""
    if cell.part >= MEMBER:
        return 1
    if cell.part == CONTRIBUTION and plan.shape != "stripes":
        degree = int(plan.shape.removeprefix("tree:"))
        places = tree_places(plan, plan.stripes[cell.stripe].owner)
        below = [places.index(cell.node)]
        for place in below:  # the list grows during the loop
            below += tree_children(place, degree, len(places))
        nodes = {places[place] for place in below}
        return sum(holder in nodes for holder in plan.holders)
    last = finisher(plan, cell.stripe)
    if cell.part == CONTRIBUTION and cell.node != last:
        return plan.holders.count(cell.node)
    if cell.part == RESULT and last is not None:
        return len(plan.holders) - plan.holders.count(last)
    return len(plan.holders)


def _fold_sources(build: _Builder, index: int, nodes: Sequence[int]) -> list[Cell]:
    """The sources of an owner's fold, in the order of `nodes`: the contributions of other nodes,
    and the owner's own members."""
    cells: list[Cell] = []
    for node in nodes:
        if node == build.node:
            cells += build.own(index)
        else:
            cells.append(Cell(index, CONTRIBUTION, node))
    return cells


def tree_places(plan: ExecuteReduce, owner: int) -> list[int]:
    """The nodes of a tree in the order of their places: the root, then the other nodes in reverse
    order of arrival, so that the earliest nodes are leaves.

    Destinations that contribute nothing are last, because they only receive the result.
    """
    arrivals = _arrivals(plan)
    others = [node for node in reversed(arrivals) if node != owner]
    idle = [node for node in plan.destinations if node not in arrivals and node != owner]
    return [owner, *others, *idle]


def _tree(plan: ExecuteReduce, node: int) -> Program:
    build = _Builder(plan, node)
    degree = int(plan.shape.removeprefix("tree:"))
    contributors = set(plan.holders)
    wanted_by = set(plan.destinations)
    for index, stripe in enumerate(plan.stripes):
        places = tree_places(plan, stripe.owner)
        if node not in places:
            continue
        place = places.index(node)
        below = [places[child] for child in tree_children(place, degree, len(places))]
        from_below = [Cell(index, CONTRIBUTION, n) for n in below if n in contributors]
        cells = (*build.own(index), *from_below)
        # A node also forwards a result that it does not keep, if a node below needs it.
        forwards = _wanted_below(places, place, degree, wanted_by)
        if place == 0:
            made = build.fold(index, RESULT, cells)
        else:
            if node in contributors:
                build.serve(index, build.fold(index, CONTRIBUTION, cells))
            made = Cell(index, RESULT, places[tree_parent(place, degree)])
            if forwards or node in wanted_by:
                build.pull(index, made)
        if forwards:
            cell = Cell(index, RESULT, node)
            if place:
                build.folds.append(Fold(cell, (made,), stripe.begin_share, stripe.end_share))
            build.serve(index, cell)
        if node in wanted_by:
            build.result.append(made)
    return build.program()


def _wanted_below(places: Sequence[int], place: int, degree: int, wanted_by: set[int]) -> bool:
    """Whether a node below this place needs the result."""
    level = tree_children(place, degree, len(places))
    while level:
        if any(places[child] in wanted_by for child in level):
            return True
        first = tree_children(level[0], degree, len(places))
        last = tree_children(level[-1], degree, len(places))
        level = range(first.start, max(first.stop, last.stop))
    return False


# A measured rate shows the capacity of a link only if the link was the bottleneck. In the model of
# `cost.py`, a direction of a node's link is a bottleneck if it carries as many bytes as the busiest
# direction of all links.


def filled_links(plan: Distribute | ExecuteReduce, node: int) -> tuple[bool, bool]:
    """Whether `node` (sends, receives) as many bytes as the busiest direction of all links."""
    if isinstance(plan, Distribute):
        return node in plan.sources, node in plan.receivers
    if plan.is_early:  # links are idle until all members have called
        return False, False
    receives = node in plan.destinations
    contributes = node in plan.holders
    if plan.kind == "gather":
        return False, receives
    if plan.kind == "reduce":
        return contributes and not receives, receives
    return contributes, receives


def shares_sent(plan: Distribute) -> dict[int, int]:
    """The shares that each node sends in a plan with rule "stripes", summed over its receivers."""
    shares: dict[int, int] = {}
    others, receiving = len(plan.receivers) - 1, set(plan.receivers)
    sources, count = plan.sources, len(plan.sources)
    for index, stripe in enumerate(plan.stripes):
        owner, width = stripe.owner, stripe.end_share - stripe.begin_share
        if owner not in receiving:
            shares[owner] = shares.get(owner, 0) + width * (others + 1)
            continue
        shares[owner] = shares.get(owner, 0) + width * others
        if count:
            source = sources[index % count]
            shares[source] = shares.get(source, 0) + width
    return shares
