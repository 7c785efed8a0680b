"""The tables of a queue and of permits: who has what, who waits, who goes next.

Why it exists: all decisions of `hoplite_mp.Queue`, `Lock` and `Semaphore` are made here, one after
the other, by one process. A *ticket* names one call: the process that made it, and a number that
this process uses once. Each method says what its caller gets, and appends to `woken` whoever of
those that wait goes on because of it.
It must never know: processes, promises, how a death is learned, what an item is.

Invariants of a queue: nobody waits for an item while one is there that is not set aside for a
getter who was woken; nobody waits for room while there is some. An item leaves the table only as
the answer to a call, so what nobody has asked for stays, whoever dies.
Invariant of permits: free + held = those that it was made with + those released beyond.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Answer", "Item", "Permits", "QueueTable", "Ticket", "Tickets"]

Ticket: TypeAlias = "tuple[bytes, int]"
Tickets: TypeAlias = "OrderedDict[Ticket, Any]"  # in the order in which they came


class Answer(enum.IntEnum):
    """What a caller gets."""

    DONE = 0
    REFUSED = 1  # empty, full, taken; or not in time
    WAIT = 2  # it will be in `woken` some day
    ENDED = 3  # the queue was shut down


class Item(NamedTuple):
    """`number` is its place among all that were put."""

    number: int
    value: Any


class QueueTable:
    """One queue."""

    def __init__(self, size_max: int) -> None:
        """size_max: 0: no limit."""
        self.size_max = size_max
        self.items: deque[Item] = deque()
        self.getters: Tickets = OrderedDict()  # wait for an item
        self.called: set[Ticket] = set()  # have been woken: an item is set aside for each
        self.putters: Tickets = OrderedDict()  # wait for room, each with its value
        self.turned_away: set[Ticket] = set()  # waited for room when the queue was shut down
        self.woken: list[tuple[Ticket, Answer]] = []
        self.unfinished = 0  # items put for which nobody has said task_done
        self.taken: dict[bytes, int] = {}  # of these, how many each living process has
        self.lost = 0  # of these, those of processes that have died
        self.ended = False
        self._numbers = 0

    # -- putting -------------------------------------------------------------------------------

    def put(self, ticket: Ticket, value: Any, waits: bool) -> Answer:
        if self.ended:
            return Answer.ENDED
        if self._has_room():
            self._add(value)
            return Answer.DONE
        if not waits:
            return Answer.REFUSED
        self.putters[ticket] = value
        return Answer.WAIT

    def stop_putting(self, ticket: Ticket) -> Answer:
        """Its time is over. DONE: the value was put just before. ENDED: the queue was shut down
        just before, and the value is not in it."""
        if ticket in self.turned_away:
            self.turned_away.discard(ticket)
            return Answer.ENDED
        if ticket in self.putters:
            del self.putters[ticket]
            return Answer.REFUSED
        return Answer.DONE

    def _has_room(self) -> bool:
        return not self.size_max or len(self.items) < self.size_max

    def _add(self, value: Any) -> None:
        self._numbers += 1
        self.items.append(Item(self._numbers, value))
        self.unfinished += 1
        self._wake_getters()

    # -- taking --------------------------------------------------------------------------------

    def take(self, ticket: Ticket, waits: bool) -> Item | Answer:
        """The oldest item. Who was woken comes again with the same ticket, and finds its own."""
        called = ticket in self.called
        if called or len(self.items) > len(self.called):
            self.called.discard(ticket)
            self.getters.pop(ticket, None)
            item = self.items.popleft()
            self.taken[ticket[0]] = self.taken.get(ticket[0], 0) + 1
            while self.putters and self._has_room():
                putter, value = self.putters.popitem(last=False)
                self._add(value)
                self.woken.append((putter, Answer.DONE))
            return item
        if self.ended or not waits:
            self.getters.pop(ticket, None)
            return Answer.ENDED if self.ended else Answer.REFUSED
        self.getters[ticket] = None
        return Answer.WAIT

    def stop_taking(self, ticket: Ticket) -> None:
        """Nobody waits with it any more."""
        self.getters.pop(ticket, None)
        if ticket in self.called:
            self.called.discard(ticket)
            self._wake_getters()

    def give_back(self, process: bytes, item: Item) -> None:
        """That process was interrupted before it had it: it goes back to its place."""
        at = 0
        while at < len(self.items) and self.items[at].number < item.number:
            at += 1
        self.items.insert(at, item)
        self._forget_taken(process)
        self._wake_getters()

    def _wake_getters(self) -> None:
        while self.getters and len(self.items) > len(self.called):
            ticket, _ = self.getters.popitem(last=False)
            self.called.add(ticket)
            self.woken.append((ticket, Answer.DONE))

    # -- join and task_done --------------------------------------------------------------------

    def finish_one(self, process: bytes) -> bool:
        """False: more were finished than were put."""
        if not self.unfinished:
            return False
        self.unfinished -= 1
        if not self._forget_taken(process) and self.lost:
            self.lost -= 1
        self.lost = min(self.lost, self.unfinished)
        return True

    def _forget_taken(self, process: bytes) -> bool:
        count = self.taken.get(process, 0)
        if count > 1:
            self.taken[process] = count - 1
        elif count:
            del self.taken[process]
        return count > 0

    def join(self) -> Answer:
        """REFUSED: all that is left was taken by processes that have died."""
        if not self.unfinished:
            return Answer.DONE
        return Answer.REFUSED if self.unfinished <= self.lost else Answer.WAIT

    # -- ends ----------------------------------------------------------------------------------

    def end(self, at_once: bool) -> None:
        """No more is put; `at_once`: nor taken."""
        self.ended = True
        if at_once:
            self.unfinished -= len(self.items)
            self.items.clear()
            self.called.clear()
        for putter in self.putters:
            self.woken.append((putter, Answer.ENDED))
        for getter in self.getters:
            self.woken.append((getter, Answer.ENDED))
        self.turned_away.update(self.putters)
        self.putters.clear()
        self.getters.clear()

    def died(self, process: bytes) -> None:
        """That process waits no more, and finishes nothing."""
        for waiting in (self.putters, self.getters):
            for ticket in [one for one in waiting if one[0] == process]:
                del waiting[ticket]
        self.called = {one for one in self.called if one[0] != process}
        self.turned_away = {one for one in self.turned_away if one[0] != process}
        self.lost = min(self.lost + self.taken.pop(process, 0), self.unfinished)
        self._wake_getters()


class Permits:
    """A lock, which has one permit, or a semaphore."""

    def __init__(self, free: int, bounded: bool) -> None:
        """bounded: a release beyond what is held is refused."""
        self.free = free
        self.bounded = bounded
        self.held: OrderedDict[bytes, Tickets] = OrderedDict()  # by process, the oldest first
        self.waiting: Tickets = OrderedDict()
        self.woken: list[tuple[Ticket, Answer]] = []

    def acquire(self, ticket: Ticket, waits: bool) -> Answer:
        if self.free and not self.waiting:
            self._grant(ticket)
            return Answer.DONE
        if not waits:
            return Answer.REFUSED
        self.waiting[ticket] = None
        return Answer.WAIT

    def stop_waiting(self, ticket: Ticket, keep: bool) -> Answer:
        """Its time is over. DONE: it had got a permit just before, and keeps it if it wants."""
        if ticket in self.waiting:
            del self.waiting[ticket]
            return Answer.REFUSED
        if ticket not in self.held.get(ticket[0], ()):
            return Answer.REFUSED
        if not keep:
            self._take_back(ticket)
            self._wake()
        return Answer.DONE

    def release(self, process: bytes) -> bool:
        """One of that process's, or else, as others may release, of the one that has held one for
        the longest time. False: none is held, and there cannot be more."""
        if self.held:
            tickets = self.held.get(process) or next(iter(self.held.values()))
            self._take_back(next(iter(tickets)))
        elif self.bounded:
            return False
        else:
            self.free += 1
        self._wake()
        return True

    def died(self, process: bytes) -> None:
        for ticket in [one for one in self.waiting if one[0] == process]:
            del self.waiting[ticket]
        self.free += len(self.held.pop(process, ()))
        self._wake()

    def _grant(self, ticket: Ticket) -> None:
        self.free -= 1
        self.held.setdefault(ticket[0], OrderedDict())[ticket] = None

    def _take_back(self, ticket: Ticket) -> None:
        tickets = self.held[ticket[0]]
        del tickets[ticket]
        if not tickets:
            del self.held[ticket[0]]
        self.free += 1

    def _wake(self) -> None:
        while self.free and self.waiting:
            ticket, _ = self.waiting.popitem(last=False)
            self._grant(ticket)
            self.woken.append((ticket, Answer.DONE))
