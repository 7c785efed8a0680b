"""Traces of the whole cluster: begun and ended on every node, and the clocks of the nodes compared.

Why it exists: the process that traces talks to its own node only; that node tells the others, also
those that join later, and hands on what they have written down, a piece at a time, so that nobody
holds all of it. Clocks are compared at the beginning and at the end: the answer to a message shows
another clock as it was, give or take half of its round trip; the fastest of several counts.

One trace at a time in a cluster: two would halve the room of each, and a second one is a mistake
more often than not. It ends with the process that began it, and with that one's host.
It must never know: what events mean, files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp.node.questions import PATIENCE_S
from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.looking import PIECE_BYTES_MAX, ClockAsked, LookTold, TraceAsked, TraceRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp.node.inspect.recording import Recording
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.questions import Answer
    from hoplite_mp.protocol.local import Request

__all__ = ["Clock", "Tracing", "best_clock"]

# Messages for one look at another node's clock. More: nearer to the shortest way that there is;
# fewer: a trace begins and ends sooner (some 0.3 ms each in a LAN).
CLOCK_ROUNDS = 8
# For nodes that must pack up to trace_events_max events first. Higher: slow nodes are in the file;
# lower: a node that hangs holds up the end of the trace for less long.
END_PATIENCE_S = 5.0

Clock = tuple[int, int, int]  # (time here, how much the other is ahead, error at most), in ns


def best_clock(known: Clock | None, asked_ns: int, came_ns: int, there_ns: int) -> Clock:
    """The more certain of what is known and of what one more answer says."""
    trip = max(0, came_ns - asked_ns)
    middle = asked_ns + trip // 2
    error = (trip + 1) // 2
    if known is not None and known[2] <= error:
        return known
    return middle, there_ns - middle, error


@dataclass(slots=True, eq=False)
class _Owned:
    """A trace of a process of this host."""

    trace: int
    slot: int
    homes: set[int] = field(default_factory=set)  # of the others that write
    nodes: dict[int, int] = field(default_factory=dict)  # their numbers -> homes, at the end
    lost: set[int] = field(default_factory=set)  # numbers of those that do not any more
    left: set[int] = field(default_factory=set)  # the same, without workers: programs that came
    before: dict[int, Clock] = field(default_factory=dict)  # by home, at the beginning


class Tracing:
    """The trace that this node takes part in, if there is one."""

    def __init__(self, host: HostContext, recording: Recording) -> None:
        self.loop = host.loop
        self.client = host.client
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.replier = host.replier
        self.questions = host.questions
        self.recording = recording
        self.owned: _Owned | None = None  # by a process of this host
        self.trace = 0  # its number, whoever owns it; 0: there is none
        self.owner = 0  # home of the host where it was begun

    # -- what a process of this host asks ------------------------------------------------------

    def begin(self, slot: int, request: Request) -> None:
        """A trace begins, when all nodes write."""
        trace = request.ask.trace  # type: ignore[union-attr]
        say = self._speaker(slot, request)
        why = self._start(trace, self.client.home)
        if why:
            say(why)
            return
        owned = self.owned = _Owned(trace, slot, set(self.roster.by_home))

        def begun(found: dict[int, Answer]) -> None:
            if self.owned is not owned:
                return
            refusal = next((a.message.error for a in found.values() if a.message.error), "")
            if refusal:
                self._end(owned, lambda: say(refusal))
                return
            for home in owned.homes - found.keys():
                self._lose(owned, home)
            self._look_at_clocks(found, clocks_known)

        def clocks_known(clocks: dict[int, Clock]) -> None:
            owned.before = clocks
            say("")

        self._ask(owned, owned.homes, "begin", begun)

    def end(self, slot: int, request: Request) -> None:
        """The end of a trace: what there is to read, of which nodes, and how their clocks go."""
        owned = self.owned
        say = self._speaker(slot, request)
        if owned is None or owned.trace != request.ask.trace:  # type: ignore[union-attr]
            say(None)
            return
        size = self.recording.stop()

        def ended(found: dict[int, Answer]) -> None:
            for home in owned.homes - found.keys():
                self._lose(owned, home)
            owned.nodes = {answer.node: home for home, answer in found.items()}
            self._look_at_clocks(found, lambda clocks: clocks_known(found, clocks))

        def clocks_known(found: dict[int, Answer], clocks: dict[int, Clock]) -> None:
            rows: list[tuple[int, int, list[Clock]]] = [(self.client.number, size, [])]
            for home, answer in found.items():
                known = [owned.before.get(home), clocks.get(home)]
                at = [clock for clock in known if clock is not None]
                if at:
                    rows.append((answer.node, answer.message.value, at))
                else:
                    owned.lost.add(answer.node)
            say((sorted(rows), sorted(owned.lost), sorted(owned.left)))

        self._ask(owned, owned.homes, "end", ended)

    def piece(self, slot: int, request: Request) -> None:
        """A part of a node's document."""
        ask: Any = request.ask
        owned = self.owned
        say = self._speaker(slot, request)
        if owned is None or owned.trace != ask.trace:
            say(None)
        elif ask.node == self.client.number:
            say(self._piece(ask.offset))
        elif ask.node not in owned.nodes:
            say(None)
        else:
            self.questions.ask(
                owned.nodes[ask.node],
                lambda number: TraceRead(number, ask.trace, ask.offset),
                lambda answer: say(None if answer is None else answer.message.data),
                END_PATIENCE_S,
            )

    def drop(self, slot: int, request: Request) -> None:
        """That trace is over, or nobody wants it any more."""
        owned = self.owned
        say = self._speaker(slot, request)
        if owned is None or owned.trace != request.ask.trace:  # type: ignore[union-attr]
            say(None)
        else:
            self._end(owned, lambda: say(None))

    def forget_client(self, slot: int) -> None:
        """That process has ended, and its trace with it."""
        if self.owned is not None and self.owned.slot == slot:
            self._end(self.owned, _nothing)

    # -- what other nodes ask ------------------------------------------------------------------

    def asked(self, home: int, message: TraceAsked) -> None:
        """A step of another host's trace."""
        value, error = 0, ""
        if message.step == "begin":
            error = self._start(message.trace, home)
        elif message.trace != self.trace or home != self.owner:
            error = "that trace is over"
        elif message.step == "end":
            value = self.recording.stop()
        else:
            self._drop()
        self.send_peer(home, LookTold(message.number, value, error=error))

    def read(self, home: int, message: TraceRead) -> None:
        """Another host reads what is written here."""
        right = message.trace == self.trace and home == self.owner
        data = self._piece(message.offset) if right else b""
        self.send_peer(home, LookTold(message.number, data=data))

    def clock(self, home: int, message: ClockAsked) -> None:
        """Another host compares clocks."""
        self.send_peer(home, LookTold(message.number, self.loop.now_ns()))

    # -- members -------------------------------------------------------------------------------

    def came(self, home: int) -> None:
        """A node that joins while this host traces is traced, too."""
        owned = self.owned
        if owned is None:
            return

        def begun(found: dict[int, Answer]) -> None:
            if self.owned is owned and home in found and not found[home].message.error:
                self._look_at_clocks(found, owned.before.update)
            else:
                self._lose(owned, home)

        owned.homes.add(home)
        self._ask(owned, [home], "begin", begun)

    def went(self, home: int, number: int, workers: int) -> None:
        """A node is gone: with a trace of its own, or with what it had written for ours."""
        if home == self.owner and self.owned is None:
            self._drop()
        if self.owned is not None and home in self.owned.homes:
            self.owned.homes.discard(home)
            (self.owned.lost if workers else self.owned.left).add(number)
            self.owned.nodes.pop(number, None)

    # -- within --------------------------------------------------------------------------------

    def _start(self, trace: int, owner: int) -> str:
        """Why this node cannot take part, or "" when it does."""
        if self.trace:
            known = self.roster.number_of(self.owner)
            number = self.client.number if known is None else known
            return f"this cluster is being traced already, by a process at h{number}: one at a time"
        self.trace, self.owner = trace, owner
        self.recording.start()
        return ""

    def _drop(self) -> None:
        self.trace = self.owner = 0
        self.owned = None
        self.recording.drop()

    def _end(self, owned: _Owned, done: Callable[[], None]) -> None:
        """Nobody needs that trace: `done` when all that live know it."""
        self._ask(owned, owned.homes, "drop", lambda found: done())
        self._drop()

    def _lose(self, owned: _Owned, home: int) -> None:
        """That node does not answer; should it begin late, it ends at once."""
        number = self.roster.number_of(home)
        if number is not None:
            owned.lost.add(number)
            self.send_peer(home, TraceAsked(0, owned.trace, "drop"))
        owned.homes.discard(home)

    def _piece(self, offset: int) -> bytes:
        return self.recording.document[offset : offset + PIECE_BYTES_MAX]

    def _ask(
        self,
        owned: _Owned,
        homes: Iterable[int],
        step: str,
        done: Callable[[dict[int, Answer]], None],
    ) -> None:
        def make(number: int) -> TraceAsked:
            return TraceAsked(number, owned.trace, step)

        self.questions.ask_all(homes, make, done, END_PATIENCE_S)

    def _speaker(self, slot: int, request: Request) -> Callable[[Any], None]:
        """Answers that request, unless its process has died meanwhile."""
        reply = self.replier(slot)
        return lambda value: reply(Reply(request.number, value))

    def _look_at_clocks(
        self, homes: Iterable[int], done: Callable[[dict[int, Clock]], None]
    ) -> None:
        """`done` gets what is known of these clocks, by home, after some rounds of messages."""
        best: dict[int, Clock] = {}
        left = CLOCK_ROUNDS

        def came(found: dict[int, Answer]) -> None:
            nonlocal left
            left -= 1
            for home, answer in found.items():
                there = answer.message.value
                known = best.get(home)
                best[home] = best_clock(known, answer.asked_ns, answer.came_ns, there)
            if left and found:
                self.questions.ask_all(found, ClockAsked, came, PATIENCE_S)
            else:
                done(best)

        self.questions.ask_all(homes, ClockAsked, came, PATIENCE_S)


def _nothing() -> None:
    """Nobody is left to hear of it."""
