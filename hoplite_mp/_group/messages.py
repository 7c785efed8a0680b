"""Point-to-point messages between members of a Group, independent of the order of calls.

A Group has methods like mpi4py's `send`, `recv` and `probe`. A message is an object in the store
that the nodes hold until it is received. So `send` never waits for the receiver, and messages that
do not fit into memory are spilled like any other object.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from hoplite_mp import _serialize
from hoplite_mp._client.memory import whole
from hoplite_mp._client.thread_futures import ThreadFuture
from hoplite_mp._common import clock, locks
from hoplite_mp._common.clock import FOREVER_NS, deadline_ns
from hoplite_mp._common.locks import starting_thread
from hoplite_mp._protocol.fields import SOURCES_MAX
from hoplite_mp._protocol.local import USER_TAG_MAX, GroupInbox, GroupMessageAck, GroupSend
from hoplite_mp.errors import (
    ClosedError,
    HopliteTimeoutError,
    ObjectLostError,
    PeerLostError,
    StoreFullError,
)

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._group.member_lifecycle import GroupMembership

__all__ = ["Arrived", "GroupMessages", "Inbox", "MemberMessages", "Receive"]

# The messages that have arrived for one member of a Group, and the pending receives.
#
# The node keeps messages until they are received. The member requests the list of new messages only
# if a counter on the board (memory shared with the node) has changed. The member matches messages
# with receives by source and tag. Messages from one source are matched in the order in which they
# were sent, receives in the order in which they were posted.


class Arrived(NamedTuple):
    """A message that this host's node has, or can fetch."""

    number: int  # in the order of arrival at this member
    source: int
    tag: int
    oid: int


class Receive:
    """A pending receive. If `source` or `tag` is None, any source or tag matches."""

    def __init__(
        self, source: int | None, tag: int | None, deadline: int, timeout: float | None = None
    ) -> None:
        self.source = source
        self.tag = tag
        self.deadline = deadline
        self.timeout = timeout  # in seconds, as passed by the caller
        self.found: Arrived | None = None
        self.ended: tuple[int, ...] = ()  # `Inbox.ended` when the receive was posted
        # The Future of a receive by `recv_async`. Another thread waits for the message.
        self.future: concurrent.futures.Future[Any] | None = None
        self.with_source = False
        self.whole_by = deadline  # the deadline until which all members must have joined

    def matches(self, one: Arrived) -> bool:
        if self.tag is None:
            return one.tag <= USER_TAG_MAX and self.source in (None, one.source)
        return self.tag == one.tag and self.source in (None, one.source)

    @property
    def cancelled(self) -> bool:
        return self.future is not None and self.future.cancelled()

    def __str__(self) -> str:
        source = "any rank" if self.source is None else f"rank {self.source}"
        return f"a message from {source}" + ("" if self.tag is None else f" with tag {self.tag}")

    @property
    def late_text(self) -> str:
        """The error text if no message arrives in time."""
        return f"{self} has not arrived" + (f" within {self.timeout:g} s" if self.timeout else "")


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
        """check: a function that raises an error if this member was removed. The reference is weak,
        because the member refers to this object."""
        self._memory = runtime.memory
        self._channel = runtime.channel
        self._generation = generation
        self._rank = rank
        self._board = board
        self._check = check
        self._everybody = (1 << size) - 1
        self._lock = locks.lock("group.inbox")
        # Held during a request to the node, so that replies are processed in order.
        self._asking = locks.lock("group.asking")
        self._news = -1  # the board's counter at the last complete fetch
        self._seen = 0  # number of the last message in the node's replies
        self._arrived: dict[int, Arrived] = {}  # unmatched messages, by number
        self._receives: list[Receive] = []  # in the order in which they were posted
        self._ended: tuple[int, ...] = (0,) * size  # see `ended`
        self._gone = 0  # mask of the ranks that will send no more messages

    # -- receives ------------------------------------------------------------------------------

    def post(self, receive: Receive) -> None:
        """Posts a receive. Earlier receives are matched with messages first."""
        self.look()
        with self._lock:
            receive.ended = self._ended
            self._receives.append(receive)
            self._match()

    def withdraw(self, receive: Receive) -> None:
        """Removes a receive. If a message was matched with it, the message becomes available to
        other receives again."""
        with self._lock:
            self._receives = [one for one in self._receives if one is not receive]
            found, receive.found = receive.found, None
            if found is not None:
                self._arrived = dict(sorted({**self._arrived, found.number: found}.items()))
                self._match()

    @property
    def ended(self) -> tuple[int, ...]:
        """For each rank, the number of its former members whose messages have all been fetched."""
        return self._ended

    def is_gone(self, rank: int) -> bool:
        """Whether that rank will send no more messages, and all its messages have been fetched."""
        return bool(self._gone >> rank & 1)

    def first(self, receive: Receive) -> Arrived | None:
        """The message that would be matched with this receive now, or None."""
        self.look()
        with self._lock:
            return next((one for one in self._arrived.values() if receive.matches(one)), None)

    def _match(self) -> None:
        for receive in self._receives:
            if receive.found is not None:  # Ctrl-C may have prevented the deletion below
                self._arrived.pop(receive.found.number, None)
        for receive in self._receives:
            if receive.found is None and not receive.cancelled:
                found = next((a for a in self._arrived.values() if receive.matches(a)), None)
                if found is not None:
                    receive.found = found
                    del self._arrived[found.number]

    def why_never(self, receive: Receive) -> str:
        """The reason why no message can match the receive any more; "" if a match is possible."""
        with self._lock:
            gone, ended = self._gone, self._ended
        source = receive.source
        if source is None:
            others = self._everybody & ~(1 << self._rank)
            if others and gone & others == others:
                return "all other ranks have left or died"
        elif gone >> source & 1 or (receive.ended and ended[source] > receive.ended[source]):
            return f"rank {source} has left or died, and all its messages have been received"
        return ""

    # -- the node ------------------------------------------------------------------------------

    def look(self) -> None:
        """Fetches the list of new messages if there are any. Raises PeerLostError if the node has
        removed this member."""
        while self._board.news(self._rank) != self._news:
            with self._asking:
                news = self._board.news(self._rank)  # before the request, so no message is missed
                if news == self._news:
                    return
                ask = GroupInbox(self._generation, self._rank, self._seen)
                found = self._channel.call(ask).value
                if found is None:
                    check = self._check()
                    if check is not None:
                        check()
                    raise PeerLostError("this member was removed: its host was declared lost")
                arrived, ended, gone, more = found
                with self._lock:
                    for one in arrived:  # requested again if Ctrl-C interrupts this loop
                        self._arrived[one[0]] = Arrived(*one)
                    if arrived:
                        self._seen = arrived[-1][0]
                    if not more:
                        self._ended, self._gone, self._news = tuple(ended), gone, news
                    self._match()

    def take(self, receive: Receive) -> Any:
        """Returns a private copy of the matched message's value. After StoreFullError,
        HopliteTimeoutError or KeyboardInterrupt, the message is still available. Raises
        PeerLostError if the sender was lost before the whole message had arrived."""
        found = receive.found
        assert found is not None
        try:
            value = self._memory.read(found.oid, receive.deadline, True)
        except ObjectLostError as error:
            self._received(receive, found)
            raise PeerLostError(
                f"rank {found.source} is lost, and with it the rest of a message that had begun to "
                f"arrive: {error}"
            ) from error
        except (StoreFullError, HopliteTimeoutError):
            self.withdraw(receive)
            raise
        except Exception:  # the value cannot be unpickled, now or later
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
        self._channel.tell(GroupMessageAck(self._generation, self._rank, found.number))


# Maximum number of refs in a request to the node, with 16 bytes each. By default the kernel accepts
# packets of up to 416 KiB.
REFS_IN_PACKET_MAX = 4096


class MemberMessages:
    """The messages of one member."""

    def __init__(self, member: GroupMembership) -> None:
        self._member = member
        self._runtime, self._memory, self._tasks = member.runtime, member.memory, member.tasks
        self._generation = member.generation
        self.name, self.rank, self.size = member.name, member.rank, member.size
        admitted = weakref.WeakMethod(member.admitted)
        self.inbox = Inbox(
            member.runtime, member.generation, member.rank, member.size, member.board, admitted
        )
        self._later: list[Receive] = []  # the receives by `recv_async`, in order
        self._later_lock = locks.lock("group.receives")
        self._later_thread: threading.Thread | None = None

    def send(self, x: Any, to: int, tag: int = 0) -> None:
        """See `Group.send`."""
        target, tag = self._rank(to, "to"), _tag(tag)
        self._check()
        self._member.begin()
        encoded = _serialize.encode(x, self._memory.scan)
        ref = self._memory.put_encoded(encoded)
        why = self.send_encoded(encoded, ref, target, tag)
        if why:
            self._member.admitted()  # raises an error if this member was removed
            raise PeerLostError(f"group {self.name!r}: {why}")

    def recv(
        self,
        source: int | None = None,
        tag: int | None = None,
        timeout: float | None = None,
        with_source: bool = False,
    ) -> Any:
        """See `Group.recv`."""
        receive = self._receive(source, tag, timeout)
        try:
            self._post(receive)
            self._member.wait(
                lambda: self.arrives(receive), receive.deadline, lambda: receive.late_text
            )
            sender = receive.found.source if receive.found is not None else -1
            value = self.inbox.take(receive)
        finally:
            self.inbox.withdraw(receive)
        return (value, sender) if with_source else value

    def probe(
        self, source: int | None = None, tag: int | None = None, timeout: float | None = None
    ) -> tuple[int, int] | None:
        """See `Group.probe`."""
        receive = self._receive(source, tag, timeout)
        found: list[Any] = []

        def look() -> bool:
            self._check()
            one = self.inbox.first(receive)
            if one is not None:
                found.append((one.source, one.tag))
                return True
            self._check_senders(receive)
            return False

        try:
            self._post(receive, probes=True)
            self._member.wait(look, receive.deadline, lambda: receive.late_text)
        except HopliteTimeoutError:
            return None
        finally:
            self.inbox.withdraw(receive)
        return found[0]  # type: ignore[no-any-return]

    def recv_async(
        self,
        source: int | None = None,
        tag: int | None = None,
        timeout: float | None = None,
        with_source: bool = False,
    ) -> ThreadFuture[Any]:
        """See `Group.recv_async`."""
        receive = self._receive(source, tag, timeout)
        receive.with_source = with_source
        # The worker counts as blocked only while its task waits for this Future, not while the
        # thread waits for messages.
        future: ThreadFuture[Any] = ThreadFuture(self._runtime.submitter.waiting)
        receive.future = future
        self._check()
        try:
            with self._later_lock:
                self.inbox.post(receive)
                self._later.append(receive)
                if receive.deadline == FOREVER_NS:
                    receive.whole_by = clock.monotonic_ns() + self._member.whole_ns()
                if self._later_thread is None:
                    thread = threading.Thread(
                        target=self._serve, name="hoplite_mp messages", daemon=True
                    )
                    with starting_thread("receives a Group's messages"):
                        thread.start()  # the thread first waits for `_later_lock`
                    self._later_thread = thread
        except BaseException:  # the caller gets no Future, so other receives may get the message
            future.cancel()
            self._settle(receive, None)
            raise
        self._tasks.wake(self._runtime.client.slot)  # the thread's next deadline may be earlier now
        return future

    def send_encoded(self, encoded: _serialize.Encoded, ref: Any, target: int, tag: int) -> str:
        """Sends the object that `ref` refers to. Returns "", or the reason why the target cannot
        receive it."""
        refs = [inner._id for inner in encoded.refs]
        oid = self._memory.local_id(ref)
        if len(refs) > SOURCES_MAX:
            raise ValueError(f"a message with {len(refs)} refs: at most {SOURCES_MAX}")
        many = len(refs) > REFS_IN_PACKET_MAX
        pinned = self._memory.payload(oid, FOREVER_NS) if many else None
        asked = None if many else refs
        ask = GroupSend(self._generation, self.rank, target, tag, oid, encoded.nbytes, asked)
        why: str = self._runtime.channel.call(ask).value
        del pinned
        return why

    # -- waiting -------------------------------------------------------------------------------

    def check_receive(self, source: Any, tag: Any, timeout: Any) -> None:
        """Raises ValueError or TypeError if an argument of `recv` is wrong."""
        self._receive(source, tag, timeout)

    def _check(self) -> None:
        if self._member.closed:
            raise ClosedError(f"group {self.name!r}: this member has left{self._member.why_left}")
        self._memory.check()
        if self._member.has_hosts and self._member.calls is not None:
            self._member.admitted()  # raises an error if this member was removed

    def _receive(self, source: Any, tag: Any, timeout: Any) -> Receive:
        """Creates a Receive without posting it. Raises ValueError or TypeError if an argument is
        wrong."""
        seconds = self._member.timeout if timeout is None else timeout
        deadline = deadline_ns(seconds)
        rank = None if source is None else self._rank(source, "source")
        return Receive(rank, None if tag is None else _tag(tag), deadline, seconds)

    def _rank(self, rank: Any, name: str) -> int:
        number = whole(rank)
        if number is None:
            raise TypeError(f"{name}={rank!r}: a rank is an integer")
        if not 0 <= number < self.size:
            raise ValueError(f"{name}={number}: it must be from 0 to {self.size - 1}")
        return number

    def _post(self, receive: Receive, *, probes: bool = False) -> None:
        """Posts a receive, or prepares it for `probe`. Like the first call, the first receive waits
        until all members have joined the group."""
        self._check()
        if self._member.calls is None:
            left = None
            if receive.deadline != FOREVER_NS:
                left = max(0.0, (receive.deadline - clock.monotonic_ns()) / 1e9)
            self._member.begin(left)
        if probes:
            self.inbox.look()
            receive.ended = self.inbox.ended
        else:
            self.inbox.post(receive)

    def arrives(self, receive: Receive) -> bool:
        self._check()
        self.inbox.look()
        if receive.found is not None:
            return True
        self._check_senders(receive)
        return False

    def _check_senders(self, receive: Receive) -> None:
        """Raises an error if no member can send a message that matches the receive."""
        why = self.inbox.why_never(receive)
        if why:
            raise PeerLostError(f"group {self.name!r}: {why}")
        waits = receive.future is None and receive.deadline > 0
        if waits and (receive.source == self.rank or self.size == 1):
            raise RuntimeError(
                f"group {self.name!r}: {receive} will never arrive: only this rank could send it, "
                "and this rank is waiting (recv_async does not wait)"
            )

    # -- the thread for recv_async -------------------------------------------------------------

    def _serve(self) -> None:
        """The thread's function. Waits for all receives by `recv_async`, and returns when none is
        left."""
        while True:
            with self._later_lock:
                waiting = list(self._later)
                if not waiting:
                    self._later_thread = None
                    return
            deadline = min(receive.deadline for receive in waiting)
            try:
                if self._member.calls is None and not self._are_all_here(waiting):
                    continue
                self._member.wait(lambda: self._changed(waiting), deadline, str, counts=False)  # noqa: B023
            except HopliteTimeoutError:
                pass
            except BaseException as error:
                for receive in waiting:
                    self._settle(receive, error)
                continue
            for receive in waiting:
                self._serve_one(receive)

    def _are_all_here(self, waiting: list[Receive]) -> bool:
        """Waits, like the first call, until all members have joined the group. Receives whose
        deadline passes meanwhile fail. Returns False if the list of receives must be read again
        first."""
        first = min(waiting, key=lambda receive: receive.whole_by)
        deadline = first.whole_by
        own = first.timeout is not None and first.deadline == deadline
        limit = f"timeout={first.timeout:g} s" if own else self._member.whole_limit()

        def look() -> bool:
            self._check()
            new = len(self._later) != len(waiting) or any(one.cancelled for one in waiting)
            return new or self._member.admitted() > 0

        try:
            self._member.wait(look, deadline, lambda: self._member.not_full(limit), counts=False)
        except HopliteTimeoutError as error:
            now = clock.monotonic_ns()
            for receive in waiting:
                if now >= receive.whole_by:
                    self._settle(receive, error)
            return False
        for receive in waiting:
            if receive.cancelled:
                self._settle(receive, None)
        if not self._member.admitted():
            return False
        self._member.begin()
        for receive in waiting:  # members that left before the group was complete do not count
            receive.ended = self.inbox.ended
        return True

    def _changed(self, waiting: list[Receive]) -> bool:
        """Whether the thread has anything to do."""
        self._check()
        self.inbox.look()
        return len(self._later) != len(waiting) or any(
            receive.found is not None or receive.cancelled or self.inbox.why_never(receive)
            for receive in waiting
        )

    def _serve_one(self, receive: Receive) -> None:
        future = receive.future
        assert future is not None
        if receive.found is None:
            why = self.inbox.why_never(receive)
            if receive.cancelled:
                self._settle(receive, None)
            elif why:
                self._settle(receive, PeerLostError(f"group {self.name!r}: {why}"))
            elif receive.deadline <= clock.monotonic_ns():
                text = f"group {self.name!r}: {receive.late_text}"
                self._settle(receive, HopliteTimeoutError(text))
            return
        if not future.set_running_or_notify_cancel():
            self._settle(receive, None)
            return
        sender = receive.found.source
        try:
            value = self.inbox.take(receive)
        except BaseException as error:
            self._settle(receive, error)
            return
        self._settle(receive, None)
        future.set_result((value, sender) if receive.with_source else value)

    def _settle(self, receive: Receive, error: BaseException | None) -> None:
        """Removes the receive. If `error` is not None, the Future fails with this error."""
        with self._later_lock:
            if receive in self._later:
                self._later.remove(receive)
        self.inbox.withdraw(receive)
        future = receive.future
        assert future is not None
        if error is not None and (future.running() or future.set_running_or_notify_cancel()):
            future.set_exception(error)

    def end(self) -> None:
        """Called when this member has left. Waits until the thread has failed all receives and has
        stopped."""
        thread = self._later_thread
        if thread is not None and thread is not threading.current_thread():
            if self._memory.client.usable:
                self._tasks.wake(self._runtime.client.slot)
            thread.join()


def _tag(tag: Any) -> int:
    number = whole(tag)
    if number is None:
        raise TypeError(f"tag={tag!r}: a tag is an integer")
    if not 0 <= number <= USER_TAG_MAX:
        raise ValueError(f"tag={number}: it must be from 0 to {USER_TAG_MAX}")
    return number


class GroupMessages:
    """Point-to-point messages, as methods of `Group`. Any thread may use them, even while a call is
    running in the background."""

    _messages: MemberMessages

    def send(self, x: Any, to: int, tag: int = 0) -> None:
        """Sends an object to a rank, which may be this one.

        After the method has returned, x may be changed. The message is kept in the store or its
        spill file until it is received, and is dropped if the receiver leaves or dies. Messages
        from one rank to another arrive in the order in which they were sent.

        Parameters
        ----------
        x : object
            Any picklable value.
        to : int
            The rank that receives x.
        tag : int, optional
            A number by which `recv` can select messages, at least 0. Default: 0.

        Raises
        ------
        ValueError
            The rank does not exist, or the tag is out of range.
        PeerLostError
            That rank has left or died.
        StoreFullError
            There is no space for the message.
        HopliteTimeoutError
            Some ranks did not join the Group in time. Nothing was sent.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("send", 2, rank)
        ...     if rank == 0:
        ...         g.send(np.arange(3), to=1, tag=7)
        ...     else:
        ...         return g.recv(source=0, tag=7)
        >>> c.spmd(peer, 2)[1].result()
        array([0, 1, 2])
        """
        self._messages.send(x, to, tag)

    def recv(
        self,
        source: int | None = None,
        tag: int | None = None,
        timeout: float | None = None,
        with_source: bool = False,
    ) -> Any:
        """Waits for a message, and returns its value.

        Messages from one source are received in the order in which they were sent.

        Parameters
        ----------
        source : int, optional
            The rank of the sender. Default: any.
        tag : int, optional
            The tag of the message. Default: any.
        timeout : float, optional
            Seconds to wait; 0 polls. Default: the Group's timeout.
        with_source : bool, optional
            If True, returns (value, rank of the sender). Default: False.

        Returns
        -------
        object
            A private copy of the value; arrays are writable.

        Raises
        ------
        HopliteTimeoutError
            No message has arrived in time.
        PeerLostError
            The source (or, without `source`, every other rank) has left or died, and all its
            messages have been received. If a rank has died but its host is alive, these include
            every message whose `send` has returned.
        RuntimeError
            Only this rank itself could send the message.

        Examples
        --------
        >>> g = c.group("to myself", size=1)
        >>> g.send("hello", to=0)
        >>> g.recv(with_source=True)
        ('hello', 0)
        >>> g.close()
        """
        return self._messages.recv(source, tag, timeout, with_source)

    def sendrecv(
        self,
        x: Any,
        to: int,
        source: int | None = None,
        tag: int = 0,
        recv_tag: int | None = None,
        timeout: float | None = None,
        with_source: bool = False,
    ) -> Any:
        """Calls `send(x, to, tag)`, then `recv(source, recv_tag, timeout, with_source)`.

        Parameters
        ----------
        x, to, tag
            As for `send`.
        source, recv_tag, timeout, with_source
            As for `recv`.

        Returns
        -------
        object
            As for `recv`.

        Raises
        ------
        ValueError, PeerLostError, StoreFullError, HopliteTimeoutError
            As for `send` and `recv`.

        Examples
        --------
        >>> def peer(rank):
        ...     g = hoplite_mp.current().group("sendrecv", 2, rank)
        ...     return g.sendrecv(f"from {rank}", to=1 - rank)
        >>> c.get(c.spmd(peer, 2))
        ['from 1', 'from 0']
        """
        # Checks the arguments of `recv` before anything is sent.
        self._messages.check_receive(source, recv_tag, timeout)
        self.send(x, to, tag)
        return self.recv(source, recv_tag, timeout, with_source)

    def probe(
        self, source: int | None = None, tag: int | None = None, timeout: float | None = None
    ) -> tuple[int, int] | None:
        """Finds the message that `recv` would receive, without receiving it.

        Parameters
        ----------
        source, tag
            As for `recv`.
        timeout : float, optional
            Seconds to wait; 0 polls. Default: the Group's timeout.

        Returns
        -------
        (source, tag) : tuple of int, or None
            None if no message has arrived in time.

        Raises
        ------
        PeerLostError, RuntimeError
            As for `recv`.

        Examples
        --------
        >>> g = c.group("probe", size=1)
        >>> g.send("hello", to=0, tag=3)
        >>> g.probe(timeout=0)
        (0, 3)
        >>> g.close()
        """
        return self._messages.probe(source, tag, timeout)

    def recv_async(
        self,
        source: int | None = None,
        tag: int | None = None,
        timeout: float | None = None,
        with_source: bool = False,
    ) -> ThreadFuture[Any]:
        """Returns a Future for the result of `recv`, without waiting.

        Receives are served in the order of their calls.

        Parameters
        ----------
        source, tag, timeout, with_source
            As for `recv`.

        Returns
        -------
        concurrent.futures.Future
            An awaitable Future. `cancel()` succeeds until the message is being read.

        Examples
        --------
        >>> g = c.group("later", size=1)
        >>> future = g.recv_async(tag=1)
        >>> g.send("hello", to=0, tag=1)
        >>> future.result()
        'hello'
        >>> g.close()
        """
        return self._messages.recv_async(source, tag, timeout, with_source)
