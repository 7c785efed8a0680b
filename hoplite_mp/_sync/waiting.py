"""The tables of the synchronization objects: which calls wait, and which call continues next.

The tables make all decisions for `hoplite_mp.Queue`, `Lock`, `Semaphore`, `RLock`, `Condition` and
`Barrier`, one at a time, in one process. A *ticket* identifies one call: it consists of the calling
process and a number that this process uses only once. Each method returns the answer to its caller,
and appends the tickets of woken calls to `woken`.

Invariants of a queue: no call waits for an item while there is an item that is not reserved for a
woken getter, and no call waits for space while there is space. An item leaves the table only as the
answer to a call (or in `end(at_once=True)`), so no item in the table is lost when a process dies.
While a cancellable call may still give its item back, no other call takes a later item. Invariant
of permits: free + held = initial permits + permits added by additional releases.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "CallAnswer",
    "Gathering",
    "Item",
    "Notifications",
    "Permits",
    "QueueTable",
    "Recursive",
    "Ticket",
    "Tickets",
]

Ticket: TypeAlias = "tuple[bytes, int]"
Tickets: TypeAlias = "OrderedDict[Ticket, Any]"  # in the order of arrival


class CallAnswer(enum.IntEnum):
    """The answer to a call."""

    DONE = 0
    REFUSED = 1  # the queue is empty or full, or the lock is held
    WAIT = 2  # the ticket will be in `woken` later
    ENDED = 3  # the queue was shut down, or the barrier is broken
    ACT = 4  # all parties have arrived, and this call runs the barrier's action
    BUSY = 5  # another call may give its item back; the ticket will be in `woken` afterwards


class Item(NamedTuple):
    """An item in a queue. `number`: its position among all items ever put, counting from 1."""

    number: int
    value: Any


class QueueTable:
    """The table for one queue."""

    def __init__(self, size_max: int) -> None:
        """`size_max`: the maximum number of items; 0 means no limit."""
        self.size_max = size_max
        self.items: deque[Item] = deque()
        self.getters: Tickets = OrderedDict()  # calls that are waiting for an item
        self.called: set[Ticket] = set()  # woken getters; an item is reserved for each
        self.putters: Tickets = OrderedDict()  # call that is waiting for space -> its value
        # Putters that were waiting when the queue was shut down.
        self.turned_away: set[Ticket] = set()
        self.woken: list[tuple[Ticket, CallAnswer]] = []
        # The call that has taken an item and may give it back, and the item's number.
        self.uncertain: tuple[Ticket, int] | None = None
        self.busy: Tickets = OrderedDict()  # calls that are waiting until `uncertain` is None
        self.turn: Ticket | None = None  # a woken call from `busy`, which will call again
        self.unfinished = 0  # number of items for which task_done has not been called
        # For each living process, the number of unfinished items that it has taken and not handed
        # over to another process, as far as `finish_one` can determine.
        self.taken: dict[bytes, int] = {}
        self.lost = 0  # number of unfinished items that dead processes had taken
        self.ended = False
        self._dropped = False  # ended with at_once=True
        self._numbers = 0

    # -- putting -------------------------------------------------------------------------------

    def put(self, ticket: Ticket, value: Any, waits: bool) -> CallAnswer:
        if self.ended:
            return CallAnswer.ENDED
        if self._has_room():
            self._add(value)
            return CallAnswer.DONE
        if not waits:
            return CallAnswer.REFUSED
        self.putters[ticket] = value
        return CallAnswer.WAIT

    def stop_putting(self, ticket: Ticket) -> CallAnswer:
        """Ends a call's wait. DONE: the value is already in the queue. ENDED: the queue has been
        shut down, and does not contain the value."""
        if ticket in self.turned_away:
            self.turned_away.discard(ticket)
            return CallAnswer.ENDED
        if ticket in self.putters:
            del self.putters[ticket]
            return CallAnswer.REFUSED
        return CallAnswer.DONE

    def _has_room(self) -> bool:
        return not self.size_max or len(self.items) < self.size_max

    def _add(self, value: Any) -> None:
        self._numbers += 1
        self.items.append(Item(self._numbers, value))
        self.unfinished += 1
        self._wake_getters()

    # -- taking --------------------------------------------------------------------------------

    def take(self, ticket: Ticket, waits: bool, uncertain: bool = False) -> Item | CallAnswer:
        """Takes the oldest item. A woken getter calls again with the same ticket, and receives its
        reserved item. `uncertain`: whether the caller will either confirm the item with
        `keep_item` or give it back."""
        if ticket == self.turn:
            self.turn = None
        if self.uncertain is not None:
            self.busy[ticket] = None
            return CallAnswer.BUSY
        self.busy.pop(ticket, None)
        found = self._take(ticket, waits, uncertain)
        self._wake_busy()
        return found

    def _take(self, ticket: Ticket, waits: bool, uncertain: bool) -> Item | CallAnswer:
        called = ticket in self.called
        if called or len(self.items) > len(self.called):
            self.called.discard(ticket)
            self.getters.pop(ticket, None)
            item = self.items.popleft()
            if uncertain:
                self.uncertain = ticket, item.number
            self.taken[ticket[0]] = self.taken.get(ticket[0], 0) + 1
            while self.putters and self._has_room():
                putter, value = self.putters.popitem(last=False)
                self._add(value)
                self.woken.append((putter, CallAnswer.DONE))
            return item
        if self.ended or not waits:
            self.getters.pop(ticket, None)
            return CallAnswer.ENDED if self.ended else CallAnswer.REFUSED
        self.getters[ticket] = None
        return CallAnswer.WAIT

    def keep_item(self, ticket: Ticket) -> None:
        """Confirms that the caller has received its item."""
        if self.uncertain is not None and self.uncertain[0] == ticket:
            self.decide()

    def decide(self) -> None:
        """Ends the uncertainty about an item: it was given back, or will not be given back."""
        self.uncertain = None
        self._wake_busy()
        self._wake_getters()

    def _wake_busy(self) -> None:
        """Wakes one call in `busy`. The next call is woken only when this call has taken its item
        or stopped waiting, because that item may be uncertain again."""
        if self.busy and self.turn is None and self.uncertain is None:
            self.turn, _ = self.busy.popitem(last=False)
            self.woken.append((self.turn, CallAnswer.DONE))

    def stop_taking(self, ticket: Ticket) -> None:
        """Ends a call's wait."""
        self.getters.pop(ticket, None)
        self._stop_being_busy(ticket)
        if ticket in self.called:
            self.called.discard(ticket)
            self._wake_getters()

    def _stop_being_busy(self, ticket: Ticket) -> None:
        self.busy.pop(ticket, None)
        if ticket == self.turn:
            self.turn = None
            self._wake_busy()

    def give_back(self, process: bytes, item: Item) -> None:
        """Puts an item back in its place, because a call was interrupted before its caller received
        the item. If the queue's items have been dropped in the meantime, this item is dropped,
        too."""
        decides = self.uncertain is not None and self.uncertain[1] == item.number
        if self._dropped:
            self.finish_one(process)
            if decides:
                self.decide()
            return
        at = 0
        while at < len(self.items) and self.items[at].number < item.number:
            at += 1
        self.items.insert(at, item)
        self._forget_taken(process)
        if decides:
            self.decide()
        self._wake_getters()

    def _wake_getters(self) -> None:
        """Wakes getters, even while another call may give its item back. The woken calls then wait
        in `busy`, for at most `sync_actors.UNCERTAIN_S`."""
        while self.getters and len(self.items) > len(self.called):
            ticket, _ = self.getters.popitem(last=False)
            self.called.add(ticket)
            self.woken.append((ticket, CallAnswer.DONE))

    # -- join and task_done --------------------------------------------------------------------

    def finish_one(self, process: bytes) -> bool:
        """Counts one item as finished. Returns False if all items are already finished."""
        if not self.unfinished:
            return False
        self.unfinished -= 1
        if not self._forget_taken(process):  # another process took the item, and may have died
            if self.lost:
                self.lost -= 1
            elif len(self.taken) == 1:
                self._forget_taken(next(iter(self.taken)))
            # If several processes have taken items, it is unknown which of them handed over this
            # item. If one of them dies, `join` may fail too early, which is better than waiting
            # indefinitely.
        self._bound_lost()
        return True

    def _bound_lost(self) -> None:
        """Limits `lost` to the unfinished items that are not in the queue, because `task_done` may
        have been called too often."""
        self.lost = min(self.lost, max(0, self.unfinished - len(self.items)))

    def _forget_taken(self, process: bytes) -> bool:
        count = self.taken.get(process, 0)
        if count > 1:
            self.taken[process] = count - 1
        elif count:
            del self.taken[process]
        return count > 0

    def join(self) -> CallAnswer:
        """The answer to `join`. REFUSED: all unfinished items had been taken by processes that have
        died."""
        if not self.unfinished:
            return CallAnswer.DONE
        return CallAnswer.REFUSED if self.unfinished <= self.lost else CallAnswer.WAIT

    # -- shutdown and deaths -------------------------------------------------------------------

    def end(self, at_once: bool) -> None:
        """Shuts down the queue: no more items can be put. `at_once`: whether its items are
        dropped."""
        self.ended = True
        if at_once:
            self.unfinished = max(0, self.unfinished - len(self.items))
            self.items.clear()
            self.called.clear()
            self._dropped = True
        for putter in self.putters:
            self.woken.append((putter, CallAnswer.ENDED))
        for getter in self.getters:
            self.woken.append((getter, CallAnswer.ENDED))
        self.turned_away.update(self.putters)
        self.putters.clear()
        self.getters.clear()

    def died(self, process: bytes) -> None:
        """Ends the calls of a process that has died. The items that it had taken are lost."""
        for waiting in (self.putters, self.getters):
            for ticket in [one for one in waiting if one[0] == process]:
                del waiting[ticket]
        self.called = {one for one in self.called if one[0] != process}
        self.turned_away = {one for one in self.turned_away if one[0] != process}
        self.lost += self.taken.pop(process, 0)
        self._bound_lost()
        for ticket in [one for one in (*self.busy, self.turn) if one and one[0] == process]:
            self._stop_being_busy(ticket)
        if self.uncertain is not None and self.uncertain[0][0] == process:
            self.decide()
        self._wake_getters()


class Permits:
    """The table for a semaphore, or for a lock, which has one permit."""

    def __init__(self, free: int, bounded: bool) -> None:
        """`bounded`: whether a release is refused if no permit is held."""
        self.free = free
        self.bounded = bounded
        self.held: OrderedDict[bytes, Tickets] = OrderedDict()  # by process, longest holder first
        self.waiting: Tickets = OrderedDict()
        self.woken: list[tuple[Ticket, CallAnswer]] = []

    def acquire(self, ticket: Ticket, waits: bool) -> CallAnswer:
        if self.free and not self.waiting:
            self._grant(ticket)
            return CallAnswer.DONE
        if not waits:
            return CallAnswer.REFUSED
        self.waiting[ticket] = None
        return CallAnswer.WAIT

    def stop_waiting(self, ticket: Ticket, keep: bool) -> CallAnswer:
        """Ends a call's wait. DONE: the call had already been granted a permit, and keeps it if
        `keep` is True."""
        if ticket in self.waiting:
            del self.waiting[ticket]
            return CallAnswer.REFUSED
        if ticket not in self.held.get(ticket[0], ()):
            return CallAnswer.REFUSED
        if not keep:
            self._take_back(ticket)
            self._wake()
        return CallAnswer.DONE

    def release(self, process: bytes) -> bool:
        """Releases a permit held by the process or, if it holds none, the permit that another
        process has held the longest. Returns False if `bounded` is True and no permit is held."""
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
            self.woken.append((ticket, CallAnswer.DONE))


class Recursive:
    """The table for a recursive lock. An owner is a thread or an asyncio task: (process,
    number)."""

    def __init__(self) -> None:
        self.owner: tuple[bytes, int] | None = None
        self.tickets: list[Ticket] = []  # one for each `acquire` by the owner
        self.waiting: OrderedDict[Ticket, tuple[int, int]] = OrderedDict()  # -> (number, times)
        self.woken: list[tuple[Ticket, CallAnswer]] = []

    def acquire(self, ticket: Ticket, waits: bool, number: int, times: int = 1) -> CallAnswer:
        owner = ticket[0], number
        if self.owner == owner or (self.owner is None and not self.waiting):
            self.owner = owner
            self.tickets += [ticket] * times
            return CallAnswer.DONE
        if not waits:
            return CallAnswer.REFUSED
        self.waiting[ticket] = number, times
        return CallAnswer.WAIT

    def stop_waiting(self, ticket: Ticket, keep: bool) -> CallAnswer:
        """Like `Permits.stop_waiting`."""
        if self.waiting.pop(ticket, None) is not None or ticket not in self.tickets:
            return CallAnswer.REFUSED
        if not keep:
            self.tickets = [one for one in self.tickets if one != ticket]
            self._wake()
        return CallAnswer.DONE

    def release(self, process: bytes, number: int) -> bool:
        """Undoes one `acquire` by the owner. Returns False if the caller is not the owner."""
        if self.owner != (process, number):
            return False
        self.tickets.pop()
        self._wake()
        return True

    def release_all(self, process: bytes, number: int) -> int:
        """Undoes all `acquire` calls by the owner. Returns their number."""
        if self.owner != (process, number):
            return 0
        times = len(self.tickets)
        self.tickets.clear()
        self._wake()
        return times

    def died(self, process: bytes) -> None:
        for ticket in [one for one in self.waiting if one[0] == process]:
            del self.waiting[ticket]
        if self.owner is not None and self.owner[0] == process:
            self.tickets.clear()
        self._wake()

    def _wake(self) -> None:
        if self.tickets:
            return
        self.owner = None
        if self.waiting:
            ticket, (number, times) = self.waiting.popitem(last=False)
            self.owner, self.tickets = (ticket[0], number), [ticket] * times
            self.woken.append((ticket, CallAnswer.DONE))


class Notifications:
    """The table for a condition: the calls that are waiting for a notification."""

    def __init__(self) -> None:
        self.waiting: Tickets = OrderedDict()
        # Calls that were notified and have not returned. If such a call is interrupted, or its
        # process dies, another call is notified in its place.
        self.notified: set[Ticket] = set()
        self.woken: list[tuple[Ticket, CallAnswer]] = []

    def wait(self, ticket: Ticket) -> None:
        self.waiting[ticket] = None

    def notify(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            ticket, _ = self.waiting.popitem(last=False)
            self.notified.add(ticket)
            self.woken.append((ticket, CallAnswer.DONE))

    def stop_waiting(self, ticket: Ticket, keep: bool) -> CallAnswer:
        """Ends a call's wait. DONE: the call had already been notified. If `keep` is False, another
        call is notified in its place."""
        if ticket in self.waiting:
            del self.waiting[ticket]
            return CallAnswer.REFUSED
        if ticket not in self.notified:
            return CallAnswer.REFUSED
        if not keep:
            self.notified.discard(ticket)
            self.notify(1)
        return CallAnswer.DONE

    def returned(self, ticket: Ticket) -> None:
        """Records that a notified call has returned."""
        self.notified.discard(ticket)

    def died(self, process: bytes) -> None:
        for ticket in [one for one in self.waiting if one[0] == process]:
            del self.waiting[ticket]
        lost = [one for one in self.notified if one[0] == process]
        self.notified.difference_update(lost)
        self.notify(len(lost))


class Gathering:
    """The table for a barrier. If the barrier has an action, the last call in a round runs it; the
    other calls in the round wait in `round` meanwhile."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.broken = False
        self.waiting: Tickets = OrderedDict()
        self.acting: Ticket | None = None
        self.round: list[Ticket] = []
        self.woken: list[tuple[Ticket, CallAnswer]] = []
        # The indices of the calls in `woken`. An index is known only when the round is complete,
        # because calls may leave an incomplete round.
        self.indices: dict[Ticket, int] = {}

    def arrive(self, ticket: Ticket, waits: bool, acts: bool) -> CallAnswer:
        """Adds a call to the round. `acts`: whether the barrier has an action. The index of a call
        that completes a round is `parties - 1`."""
        if self.broken:
            return CallAnswer.ENDED
        # While an action is running, several rounds may be waiting.
        if len(self.waiting) + 1 == self.parties and self.acting is None:
            others, self.waiting = list(self.waiting), OrderedDict()
            if acts:
                self.acting, self.round = ticket, others
                return CallAnswer.ACT
            self._release(others)
            return CallAnswer.DONE
        if not waits:
            self.abort()
            return CallAnswer.ENDED
        self.waiting[ticket] = None
        return CallAnswer.WAIT

    def _release(self, others: list[Ticket]) -> None:
        self.indices.update((other, index) for index, other in enumerate(others))
        self.woken += [(other, CallAnswer.DONE) for other in others]

    def acted(self, ticket: Ticket) -> bool:
        """Ends the round after its action. Returns False if the barrier was broken or reset in the
        meantime."""
        if self.acting != ticket:
            return False
        self._release(self.round)
        self.acting, self.round = None, []
        if len(self.waiting) >= self.parties:  # the next round is already complete
            *others, last = [self.waiting.popitem(last=False)[0] for _ in range(self.parties)]
            self.acting, self.round = last, others
            self.indices[last] = self.parties - 1
            self.woken.append((last, CallAnswer.ACT))
        return True

    def give_up(self, ticket: Ticket) -> CallAnswer:
        """Breaks the barrier because a call has timed out. DONE: the call was already answered, and
        the barrier is not broken."""
        if ticket in self.waiting or ticket in self.round:
            self.abort()
            return CallAnswer.ENDED
        return CallAnswer.DONE

    def leave(self, ticket: Ticket) -> None:
        """Removes an interrupted call. The other calls wait for another call in its place. If the
        interrupted call was to run the action, the barrier is broken."""
        self.waiting.pop(ticket, None)
        if ticket == self.acting:
            self.abort()

    def abort(self) -> None:
        self.broken = True
        self._end_round()

    def reset(self) -> None:
        self.broken = False
        self._end_round()

    def died(self, process: bytes) -> None:
        here = [*self.waiting, *([self.acting] if self.acting else [])]
        if any(ticket[0] == process for ticket in here):
            self.abort()

    def _end_round(self) -> None:
        self.woken += [(ticket, CallAnswer.ENDED) for ticket in (*self.waiting, *self.round)]
        self.waiting, self.acting, self.round = OrderedDict(), None, []
