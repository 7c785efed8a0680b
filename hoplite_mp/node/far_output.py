"""Workers' lines that cross hosts: those of this host for drivers elsewhere, and the other way.

Why it exists: lines for a driver elsewhere go to its node, a bounded number of bytes ahead of what
that driver has taken. They go before the end of their task is told, on the same wire, so they are
there when its result is. A driver that leaves asks for what is still on the way.
It must never know: pipes, what the lines mean, how messages travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.node.audiences import Audience
from hoplite_mp.protocol.output import (
    FAR_BYTES_MAX,
    LastLinesAsked,
    LastLinesSent,
    Printed,
    PrintedTaken,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.output import Output
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["FarOutput"]

# Taken bytes are told in such steps: an answer for every line would be as many messages as lines.
TOLD_BYTES_MIN = FAR_BYTES_MAX // 4


class Speaker:
    """Another node, as far as its workers have lines for this host's driver."""

    def __init__(self, home: int, number: int, tell: Callable[[int, PeerMessage], bool]) -> None:
        self.home = home
        self.number = number
        self.tell = tell
        self.untold = 0

    def taken(self, nbytes: int) -> None:
        """This host's driver has taken so much of that node's lines."""
        self.untold += nbytes
        if self.untold >= TOLD_BYTES_MIN:
            self.tell(self.home, PrintedTaken(self.untold))
            self.untold = 0


class FarOutput:
    """Both sides of it, on one node."""

    def __init__(
        self,
        output: Output,
        send: Callable[[int, PeerMessage], bool],
        number_of: Callable[[int], int | None],
        busy: Callable[[int], bool],
    ) -> None:
        """number_of: the node of a home, None if it is gone. busy: does that slot's worker run a
        task?"""
        self.output = output
        self.send = send
        self.number_of = number_of
        self.busy = busy
        self.audiences: dict[int, Audience] = {}  # by home
        self.speakers: dict[int, Speaker] = {}
        self.others: dict[int, set[int]] = {}  # home of a driver -> who else may have lines for it
        self.asked: set[int] = set()  # homes of drivers that wait for their last lines
        self.asking: set[int] = set()  # homes of nodes that have not sent theirs
        self.heard: set[int] = set()  # and of those that were asked
        output.far = self.audience

    # -- lines of this host --------------------------------------------------------------------

    def audience(self, home: int) -> Audience | None:
        """The driver of that host; None: it is gone."""
        if self.number_of(home) is None:
            return None
        known = self.audiences.get(home)
        if known is None:

            def deliver(slot: int, stream: int, lines: list[bytes]) -> None:
                self.send(home, Printed(slot, stream, lines))

            known = Audience(deliver, FAR_BYTES_MAX, self.output.patience_s)
            self.audiences[home] = known
        return known

    def sent_on(self, audience: int, home: int) -> None:
        """A task that speaks to that driver was sent from here to another host."""
        if self.number_of(audience) is not None:
            self.others.setdefault(audience, set()).add(home)

    def taken(self, home: int, message: PrintedTaken) -> None:
        """That host's driver has taken some."""
        audience = self.audiences.get(home)
        if audience is not None:
            self.output.taken(audience, message.nbytes)

    def last_lines_asked(self, home: int) -> None:
        """That host's driver leaves."""
        self.asked.add(home)
        self.look()

    def look(self) -> None:
        """Who waits for last lines is answered when there are no more."""
        for home in list(self.asked):
            self.output.last_lines(home)
            if not self.output.waits_for(home):
                self.asked.discard(home)
                self.send(home, LastLinesSent(tuple(self.others.get(home, ()))))

    # -- lines for this host's driver ----------------------------------------------------------

    def printed(self, home: int, message: Printed) -> None:
        """Lines of that node's workers."""
        speaker = self.speakers.get(home)
        if speaker is None:
            number = self.number_of(home)
            if number is None:
                return
            speaker = self.speakers[home] = Speaker(home, number, self.send)
        self.output.to_driver(
            message.slot, speaker.number, message.stream, message.lines, speaker.taken
        )

    def ask_last_lines(self, homes: list[int]) -> None:
        """This host's driver leaves: what is still on the way to it shall come now."""
        for home in homes:
            if home not in self.heard:
                self.heard.add(home)
                self.asking.add(home)
                if not self.send(home, LastLinesAsked()):
                    self.asking.discard(home)

    def last_lines_sent(self, home: int, message: LastLinesSent) -> None:
        """All of that node's lines have come."""
        self.ask_last_lines([other for other in message.others if other != self.output.home])
        self.asking.discard(home)

    # ------------------------------------------------------------------------------------------

    def lose_peer(self, home: int) -> None:
        """That host is gone, its driver and its workers."""
        self.audiences.pop(home, None)
        self.speakers.pop(home, None)
        self.asked.discard(home)
        self.asking.discard(home)
        self.others.pop(home, None)
        self.output.lose(home, self.busy)

    @property
    def quiet(self) -> bool:
        """Nobody has to send anything more."""
        return not self.asking
