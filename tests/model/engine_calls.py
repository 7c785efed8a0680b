"""Calls of Groups that engines commit, explored completely: cext/engine_coll.h as steps.

Each node has three actors: a member, the engine's thread, and Python; what one says to another is a
step of its own, and so are a frame's arrival, the death of a host, and its announcement, which
Python of each node hears at a time of its own. Every order of all steps is tried.

A large call (`large`) is begun by Python, which moves its bytes by a repeated plan. The engine
votes when all nodes have begun, because each waits for bytes of all others; before that, Python may
have to give it up. One member may give a small part instead.

What must hold: members on hosts that live agree on who contributed to each call, and somebody can
always go on until all have made all calls. `broken` names a rule that is left out, to show that the
exploration finds what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES", "Found", "explore"]

RULES = {
    "freeze": "a node answers a change of the members although its engine goes on",
    "hand on": "what one node has seen committed is not passed on",
    "same call": "a node opens its engine at a call of its own",
    "last word": "a node gives up a large call for which it has voted",
    "begun": "a node that moves a large call waits, whatever the others give",
}
NONE = -1
GIVES, YIELDS, BEGUN, VOTES = "gives", "yields", "begun", "votes"


class Frame(NamedTuple):
    sender: int
    to: int
    version: int
    call: int
    says: str


class Node(NamedTuple):
    """`seen`: of each call, who contributed to what the member here has read."""

    seen: tuple[int, ...] = ()
    gave: bool = False  # the member has made its next call, call len(seen)
    # The engine's thread.
    part: int = NONE  # the call whose part it has from the board
    is_open: bool = True
    version: int = 1
    call: int = 0
    sent: bool = False  # its last word of this call
    begun: bool = False  # Python moves this call, and its first word was sent
    voted: bool = False  # the last word is a vote
    got: frozenset[Frame] = frozenset()
    closing: bool = False  # Python has asked for it
    yielding: bool = False
    opening: tuple[int, int, int] | None = None  # (version, call, members) from Python
    last: int = NONE  # contributors of the call before `call`, if it has committed that
    # Python.
    owned: bool = True  # it has not heard TAKEN
    taken: bool = False  # TAKEN is on its way
    asked: int = NONE  # the call that the member has made by way of Python
    calls: int = 0
    known: int = NONE  # contributors of the call before `calls`
    heard: int = 1
    commit: tuple[int, int, int] | None = None  # (call, contributors, opens) is on its way


@dataclass(frozen=True)
class World:
    nodes: tuple[Node, ...]
    frames: frozenset[Frame] = frozenset()
    version: int = 1
    dead: int = NONE
    yielded: bool = False
    dies: bool = True
    large: frozenset[int] = frozenset()  # calls


@dataclass
class Found:
    """How many states there are; what went wrong, and by which steps."""

    states: int
    violation: str = ""
    trace: tuple[str, ...] = ()


class Violation(Exception):
    pass


def explore(
    count: int,
    calls: int,
    broken: str = "",
    yields: bool = True,
    large: frozenset[int] = frozenset(),
    dies: bool = True,
) -> Found:
    """All orders for so many nodes, one member each, with `dies` one death and, with `yields`, one
    call that deviates: what is not small instead of a small part, a small part instead of a large
    one, or a large one that its node gives up."""
    begin = World(tuple(Node() for _ in range(count)), yielded=not yields, large=large, dies=dies)
    before: dict[World, tuple[World | None, str]] = {begin: (None, "")}
    waiting = [begin]
    for world in waiting:
        ended = True
        try:
            _judge(world)
            for step, following in _steps(world, calls, broken):
                ended = False
                if following not in before:
                    before[following] = world, step
                    waiting.append(following)
            if ended:
                _judge_end(world, calls)
        except Violation as violation:
            trace: list[str] = []
            at: World | None = world
            while at is not None:
                at, step = before[at]
                trace.append(step)
            return Found(len(before), str(violation), tuple(reversed(trace[:-1])))
    return Found(len(before))


def _judge(world: World) -> None:
    living = [node for number, node in enumerate(world.nodes) if number != world.dead]
    for call in range(max(len(node.seen) for node in living)):
        answers = {node.seen[call] for node in living if len(node.seen) > call}
        if len(answers) > 1:
            raise Violation(f"call {call} has {sorted(answers)} as contributors")


def _judge_end(world: World, calls: int) -> None:
    for number, node in enumerate(world.nodes):
        if number != world.dead and len(node.seen) < calls:
            raise Violation(f"the member of node {number} waits in call {len(node.seen)} for ever")


def _members(world: World, version: int) -> int:
    whole = (1 << len(world.nodes)) - 1
    return whole if version == 1 else whole & ~(1 << world.dead)


def _with(world: World, number: int, **changes: object) -> World:
    nodes = list(world.nodes)
    nodes[number] = nodes[number]._replace(**changes)
    return replace(world, nodes=tuple(nodes))


def _steps(world: World, calls: int, broken: str) -> Iterator[tuple[str, World]]:
    for number, node in enumerate(world.nodes):
        if number != world.dead:
            for step, following in _of_node(world, number, node, calls, broken):
                yield f"node {number}: {step}", following
    for frame in world.frames:
        less = replace(world, frames=world.frames - {frame})
        if frame.to == world.dead:
            continue
        got = {
            one for one in world.nodes[frame.to].got
            if one.sender != frame.sender or one.call % 2 != frame.call % 2
        }  # fmt: skip
        known = world.nodes[frame.to].got - got
        if frame.says == BEGUN and any(
            (one.version, one.call) >= (frame.version, frame.call) for one in known
        ):
            got |= known  # it was overtaken by the sender's last word
        else:
            got.add(frame)
        yield f"{frame} arrives", _with(less, frame.to, got=frozenset(got))
    if world.dead == NONE and world.dies:
        for number in range(len(world.nodes)):
            gone = replace(world, dead=number, version=2)
            if number == 0:  # it led: what it has not sent yet is lost
                for other in range(1, len(world.nodes)):
                    gone = _with(gone, other, commit=None)
            kept = frozenset(f for f in world.frames if number not in (f.sender, f.to))
            yield f"node {number} dies with its frames", replace(gone, frames=kept)
            for frame in world.frames - kept:  # or all but one
                if frame.sender == number:
                    yield (
                        f"node {number} dies but for {frame}",
                        replace(gone, frames=kept | {frame}),
                    )
    yield from _decide(world, calls, broken)


def _of_node(
    world: World, number: int, node: Node, calls: int, broken: str
) -> Iterator[tuple[str, World]]:
    call = len(node.seen)
    if not node.gave and call < calls and call in world.large:
        yield "its member gives much", _with(world, number, gave=True, asked=call)
        if not world.yielded:
            other = replace(world, yielded=True)
            yield "its member gives a small part", _with(other, number, gave=True, part=call)
    elif not node.gave and call < calls:
        yield "its member gives", _with(world, number, gave=True, part=call)
        if not world.yielded:
            asking = replace(world, yielded=True)
            changes: dict[str, object] = {"gave": True, "asked": call}
            if node.owned:
                changes["yielding"] = True
            yield "its member gives what is not small", _with(asking, number, **changes)
    if node.last != NONE and node.call == call + 1 and node.gave:
        yield "its member reads", _with(world, number, seen=(*node.seen, node.last), gave=False)
    yield from _of_engine(world, number, node)
    if node.is_open and node.owned:
        yield from _of_votes(world, number, node, broken)
    if node.taken:
        yield "Python hears TAKEN", _with(world, number, **_taken(node))
    if node.heard != world.version and not node.closing and not node.taken:
        if node.owned and broken == "freeze":
            changes = {**_taken(node), "heard": world.version, "owned": False}
            yield "Python hears of the death, and asks nobody", _with(world, number, **changes)
        elif node.owned:
            yield "Python hears of the death, and freezes", _with(world, number, closing=True)
        else:
            yield "Python hears of the death", _with(world, number, heard=world.version)
    if node.commit is not None and not node.owned:
        yield "a commit arrives", _with(world, number, **_committed(node, broken))


def _taken(node: Node) -> dict[str, object]:
    changes: dict[str, object] = {"taken": False, "owned": False}
    if node.call > node.calls:
        changes |= {"calls": node.call, "known": node.last}
    if node.part == node.call:
        changes["asked"] = node.call
    return changes


def _committed(node: Node, broken: str) -> dict[str, object]:
    assert node.commit is not None
    call, contributors, opens = node.commit
    if call < node.calls:
        return {"commit": None}
    changes: dict[str, object] = {"commit": None, "calls": call + 1, "known": contributors}
    if len(node.seen) == call:
        changes |= {"seen": (*node.seen, contributors), "gave": False}
    if opens == node.heard:
        first = call + 2 if broken == "same call" else call + 1
        # What it was asked for before, it does before.
        changes |= {"opening": (opens, first, contributors), "owned": True,
                    "closing": False, "yielding": False}  # fmt: skip
    return changes


def _of_engine(world: World, number: int, node: Node) -> Iterator[tuple[str, World]]:
    if node.opening is not None:
        version, call, _ = node.opening
        changes = {"opening": None, "is_open": True, "version": version, "call": call,
                   "sent": False, "begun": False, "voted": False, "last": NONE}  # fmt: skip
        yield "the engine opens", _with(world, number, **changes)
        return
    if not node.is_open:
        if node.part != NONE and node.part > node.asked and not node.owned:
            yield "the engine passes a part on", _with(world, number, asked=node.part)
        if node.closing:
            yield "it is closed already", _with(world, number, closing=False)
        return
    close = {"is_open": False, "taken": True, "closing": False, "yielding": False}
    if node.closing:
        yield "the engine is frozen", _with(world, number, **close)
    others = [n for n in range(len(world.nodes)) if n != number]
    others = [n for n in others if _members(world, node.version) >> n & 1]
    if node.part == node.call and not node.sent:
        yield "the engine gives", _with(_says(world, number, GIVES), number, sent=True)
    if node.yielding and not node.sent:
        yield "the engine yields", _with(_says(world, number, YIELDS), number, sent=True, **close)
    here = {
        frame.sender: frame for frame in node.got
        if frame.call == node.call and frame.version == node.version
    }  # fmt: skip
    last_words = {sender for sender, frame in here.items() if frame.says != BEGUN}
    word = VOTES if node.voted else GIVES
    if any(frame.says == YIELDS for frame in here.values()):
        yield "the engine finds a yield", _with(world, number, **close)
    elif node.sent and all(other in last_words for other in others):
        if any(frame.says != word for frame in here.values()):
            yield "the engine finds that they differ", _with(world, number, **close)
            return
        members = _members(world, node.version)
        done = {"call": node.call + 1, "sent": False, "begun": False, "voted": False,
                "last": members}  # fmt: skip
        yield "the engine commits", _with(world, number, **done)


def _says(world: World, number: int, word: str) -> World:
    """The node's engine sends that to all others."""
    node = world.nodes[number]
    others = [n for n in range(len(world.nodes)) if n != number]
    others = [n for n in others if _members(world, node.version) >> n & 1]
    frames = {Frame(number, to, node.version, node.call, word) for to in others}
    return replace(world, frames=world.frames | frames)


def _of_votes(world: World, number: int, node: Node, broken: str) -> Iterator[tuple[str, World]]:
    """Steps of a large call that is in progress while the engine owns the calls."""
    call = node.call
    if node.opening is not None or call not in world.large or node.taken:
        return
    close = {"is_open": False, "taken": True, "closing": False, "yielding": False}
    if node.asked == call and not node.begun and not node.sent:
        yield "Python begins", _with(_says(world, number, BEGUN), number, begun=True)
    if not node.begun or (node.sent and broken != "last word"):
        return
    others = [n for n in range(len(world.nodes)) if n != number]
    others = [n for n in others if _members(world, node.version) >> n & 1]
    moving = [world.nodes[n] for n in others]
    if not node.sent and all(
        one.version == node.version and ((one.begun and one.call == call) or one.call > call)
        for one in moving
    ):
        voting = _says(world, number, VOTES)
        yield "the engine votes", _with(voting, number, sent=True, voted=True)
    gives = any(
        frame.says == GIVES and (frame.version, frame.call) == (node.version, call)
        for frame in node.got
    )
    if gives and not node.sent and broken != "begun":
        yielding = _says(world, number, YIELDS)
        yield "the engine sees parts, and yields", _with(yielding, number, sent=True, **close)
    if not world.yielded:
        asking = replace(_says(world, number, YIELDS), yielded=True)
        yield "Python gives it up", _with(asking, number, sent=True, voted=False, **close)


def _decide(world: World, calls: int, broken: str) -> Iterator[tuple[str, World]]:
    """The leading node, which has heard all, passes on what is committed, and decides a call that
    all have made."""
    living = [n for n in range(len(world.nodes)) if n != world.dead]
    nodes = [world.nodes[n] for n in living]
    if any(node.heard != world.version or node.owned or node.taken or node.commit or node.opening
           for node in nodes):  # fmt: skip
        return
    most = max(node.calls for node in nodes)
    behind = [n for n in living if world.nodes[n].calls < most]
    if behind and broken != "hand on":
        knows = next(node.known for node in nodes if node.calls == most)
        for number in behind:
            if world.nodes[number].calls < most - 1:
                raise Violation(f"node {number} lacks more than one call")
            world = _with(world, number, commit=(most - 1, knows, 0))
        yield "what one has seen is passed on", world
        return
    call = min(node.calls for node in nodes)
    if call < calls and all(node.asked >= call for node in nodes):
        members = _members(world, world.version)
        for number in living:
            world = _with(world, number, commit=(call, members, world.version))
        yield f"call {call} is decided", world
