"""Messages that have arrived for one member of a Group, and the receives that wait for them.

The node keeps what other members have sent until it has been received. The member asks its node for
the list of new messages, but only when a counter on the board shows that there are any. It matches
them with its receives by (source, tag): messages of one source in the order in which they were
sent, receives in the order in which they were posted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hoplite_mp._common import locks
from hoplite_mp._protocol.local import RESULT_TAG, GroupInbox, GroupReceived
from hoplite_mp.errors import HopliteTimeoutError, ObjectLostError, PeerLostError, StoreFullError

if TYPE_CHECKING:
    import concurrent.futures
    import weakref
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp._client.runtime import Runtime

__all__ = ["Arrived", "Inbox", "Receive"]


class Arrived(NamedTuple):
    """A message that the node of this host has as a whole, or can fetch."""

    number: int  # in the order of arrival at this member
    source: int
    tag: int
    oid: int


class Receive:
    """One receive that waits. `source`, `tag`: None for any."""

    def __init__(
        self, source: int | None, tag: int | None, deadline: int, timeout: float | None = None
    ) -> None:
        self.source = source
        self.tag = tag
        self.deadline = deadline
        self.timeout = timeout  # seconds from which the deadline was made
        self.found: Arrived | None = None
        self.ended: tuple[int, ...] = ()  # `Inbox.ended` when it was posted
        # For a receive of `recv_async`, for which another thread waits.
        self.future: concurrent.futures.Future[Any] | None = None
        self.with_source = False
        self.whole_by = deadline  # until when it waits for a group that is not whole

    def matches(self, one: Arrived) -> bool:
        if self.tag is None:
            return one.tag != RESULT_TAG and self.source in (None, one.source)
        return self.tag == one.tag and self.source in (None, one.source)

    @property
    def cancelled(self) -> bool:
        return self.future is not None and self.future.cancelled()

    def __str__(self) -> str:
        source = "any rank" if self.source is None else f"rank {self.source}"
        return f"a message from {source}" + ("" if self.tag is None else f" with tag {self.tag}")

    @property
    def is_late(self) -> str:
        """The text of the error if no message comes in time."""
        return f"{self} has not come" + (f" within {self.timeout:g} s" if self.timeout else "")


class Inbox:
    """The inbox of one member. Any thread of its process may use it."""

    def __init__(
        self,
        runtime: Runtime,
        generation: int,
        rank: int,
        size: int,
        board: _tasks.Board,
        check: weakref.WeakMethod[Callable[[], int]],
    ) -> None:
        """check: raises the error of a member that was given up. Weak, because the member refers to
        this object."""
        self._memory = runtime.memory
        self._channel = runtime.channel
        self._generation = generation
        self._rank = rank
        self._board = board
        self._check = check
        self._everybody = (1 << size) - 1
        self._lock = locks.lock("group.inbox")
        # One request at a time, so that replies stay in order.
        self._asking = locks.lock("group.asking")
        self._news = -1  # the board's counter up to which everything was fetched
        self._seen = 0  # number of the last message that the node has listed
        self._arrived: dict[int, Arrived] = {}  # by number; neither received nor matched
        self._receives: list[Receive] = []  # in the order in which they were posted
        self._ended: tuple[int, ...] = (0,) * size  # see `ended`
        self._gone = 0  # bits of the ranks from which nothing more will come

    # -- receives ------------------------------------------------------------------------------

    def post(self, receive: Receive) -> None:
        """From now on the receive is matched with messages, after the receives that were posted
        before."""
        self.look()
        with self._lock:
            receive.ended = self._ended
            self._receives.append(receive)
            self._match()

    def withdraw(self, receive: Receive) -> None:
        """The receive no longer waits; a message that was matched with it is there for others
        again."""
        with self._lock:
            self._receives = [one for one in self._receives if one is not receive]
            found, receive.found = receive.found, None
            if found is not None:
                self._arrived = dict(sorted({**self._arrived, found.number: found}.items()))
                self._match()

    @property
    def ended(self) -> tuple[int, ...]:
        """By rank: how many members that held it have ended, after all their messages were
        listed."""
        return self._ended

    def first(self, receive: Receive) -> Arrived | None:
        """The message that such a receive would be matched with now."""
        self.look()
        with self._lock:
            return next((one for one in self._arrived.values() if receive.matches(one)), None)

    def _match(self) -> None:
        for receive in self._receives:
            if receive.found is not None:  # Ctrl-C may have come between the last two lines
                self._arrived.pop(receive.found.number, None)
        for receive in self._receives:
            if receive.found is None and not receive.cancelled:
                found = next((a for a in self._arrived.values() if receive.matches(a)), None)
                if found is not None:
                    receive.found = found
                    del self._arrived[found.number]

    def why_never(self, receive: Receive) -> str:
        """Why no message will match the receive any more; "" if one may."""
        with self._lock:
            gone, ended = self._gone, self._ended
        source = receive.source
        if source is None:
            others = self._everybody & ~(1 << self._rank)
            if others and gone & others == others:
                return "all other ranks have left or died"
        elif gone >> source & 1 or (receive.ended and ended[source] > receive.ended[source]):
            return f"rank {source} has left or died, and all that it had sent is received"
        return ""

    # -- the node ------------------------------------------------------------------------------

    def look(self) -> None:
        """Fetches the list of new messages, if there are any. PeerLostError: the node no longer has
        this member."""
        while self._board.news(self._rank) != self._news:
            with self._asking:
                news = self._board.news(self._rank)  # before the request, so nothing is missed
                if news == self._news:
                    return
                ask = GroupInbox(self._generation, self._rank, self._seen)
                found = self._channel.call(ask).value
                if found is None:
                    check = self._check()
                    if check is not None:
                        check()
                    raise PeerLostError("this member was given up")
                arrived, ended, gone, more = found
                with self._lock:
                    for one in arrived:  # if Ctrl-C interrupts this, they are listed again
                        self._arrived[one[0]] = Arrived(*one)
                    if arrived:
                        self._seen = arrived[-1][0]
                    if not more:
                        self._ended, self._gone, self._news = tuple(ended), gone, news
                    self._match()

    def take(self, receive: Receive) -> Any:
        """The value of the message that was matched, as this process's own. After StoreFullError,
        HopliteTimeoutError and KeyboardInterrupt the message is still there. PeerLostError: the
        rest of it was lost with its sender.
        """
        found = receive.found
        assert found is not None
        try:
            value = self._memory.read(found.oid, receive.deadline, True)
        except ObjectLostError as error:
            self._received(receive, found)
            raise PeerLostError(
                f"rank {found.source} is lost, and with it a message that had arrived in part: "
                f"{error}"
            ) from error
        except (StoreFullError, HopliteTimeoutError):
            self.withdraw(receive)
            raise
        except Exception:  # it cannot be unpickled here, nor could it be later
            self._received(receive, found)
            raise
        except BaseException:
            self.withdraw(receive)
            raise
        self._received(receive, found)
        return value

    def _received(self, receive: Receive, found: Arrived) -> None:
        with self._lock:
            self._receives = [one for one in self._receives if one is not receive]
            receive.found = None
        self._channel.tell(GroupReceived(self._generation, self._rank, found.number))
