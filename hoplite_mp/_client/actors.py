"""One process's access to actors: creating, finding and calling them.

A handle is a ref to the actor's identity, with data about its class. This module requests
identities from the node, and turns calls into tasks in the actor's pool. The submitter keeps these
tasks in order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from hoplite_mp import _serialize, errors
from hoplite_mp._client.channel import take_over
from hoplite_mp._common import ids, locks
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.actors import (
    ABOUT_BYTES_MAX,
    ActorRestarts,
    BindActor,
    EndActor,
    FindActor,
    OpenActor,
)
from hoplite_mp._protocol.local import POOL_LEAVING, LeavingNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.ports import MembershipPort
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.spawning import Environment

__all__ = ["ActorClient", "ActorInfo", "ActorSetup"]

POOL_CLOSING = 2
# Default retries of a call: none, because the first try may have changed the actor's state.
RETRIES = 0


class ActorInfo(NamedTuple):
    """The data in every handle of an actor."""

    class_name: str
    name: str
    methods: frozenset[str]
    retries: int
    timeout: float | None
    copy: bool
    restarts: int
    places: tuple[int, ...]  # numbers of the nodes on which the actor may run; empty: any
    checkpoint: int  # number of calls after which the actor's state is saved; 0: never
    asyncs: frozenset[str] = frozenset()  # methods that are `async def`
    streams: frozenset[str] = frozenset()  # methods that are generators
    concurrency: int = 1
    buffersize: int | None = None

    @property
    def plain(self) -> tuple[Any, ...]:
        """The data to pickle. Equal handles have equal bytes in every process, because sets, whose
        order differs between processes, are sorted."""
        return tuple(
            tuple(sorted(value)) if isinstance(value, frozenset) else value for value in self
        )

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> ActorInfo:
        """The inverse of `plain`."""
        one = cls(*plain)
        return one._replace(
            methods=frozenset(one.methods),
            asyncs=frozenset(one.asyncs),
            streams=frozenset(one.streams),
        )


class ActorSetup(NamedTuple):
    """The data from which an actor's process creates its object at each start."""

    constructor: bytes
    arguments: ObjectRef[Any]
    copy: bool
    checkpoint: int
    concurrency: int = 1
    again: bytes = b""  # pickled exception types after which a call is retried


class CallNumber(NamedTuple):
    """Identifies a call to an actor with checkpoints, so that a repeated call is recognised."""

    caller: bytes  # the calling process
    turn: int  # number of the call among that process's calls to such actors
    seen: int  # the caller has the results of all calls with a smaller `turn`


class ActorClient:
    """The actors known to one process."""

    def __init__(self, runtime: MembershipPort) -> None:
        self._runtime = runtime
        self._pools: dict[int, int] = {}  # local id of an identity -> its pool
        # Reentrant, because pickling arguments may call actors.
        self._lock = locks.rlock("actors.numbered_calls")
        # Local ids of the identities of the actors that this process has created last, excluding
        # detached actors.
        self._opened: dict[int, None] = {}
        self._caller = os.urandom(CALLER_BYTES)
        # Numbers calls to actors with checkpoints. A number is never reused, even if its entry in
        # `_unseen` is dropped.
        self._turns = itertools.count(1)
        # Local id of an identity -> the calls whose results may not have arrived yet (number of the
        # call -> local id of the task; 0 if not yet submitted).
        self._unseen: dict[int, dict[int, int]] = {}

    # -- identities ----------------------------------------------------------------------------

    def open(
        self,
        cls: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        about: ActorInfo,
        get_if_exists: bool,
        detached: bool,
        nodes: Iterator[int],
        env: Environment = (),
        again: tuple[type[Exception], ...] = (),
        demand: Demand = (),
    ) -> tuple[ObjectRef[Any], ActorInfo]:
        """Creates an actor on the first of these nodes that is not leaving the cluster. With a
        `demand`, the first node that can meet the demand now is preferred. With get_if_exists,
        returns the existing actor with that name and its own ActorInfo, if there is one. Raises
        NodeLostError if the node is lost or all nodes are leaving, and ValueError if the class has
        too many methods."""
        memory = self._runtime.memory
        memory.check()
        known_of = pickle.dumps(about.plain, 5)
        if len(known_of) > ABOUT_BYTES_MAX:
            raise ValueError(
                f"{title(about)} has {len(about.methods)} methods: their description in a handle "
                f"takes {len(known_of)} bytes, and the maximum is {ABOUT_BYTES_MAX}; create the "
                "actor from a class with fewer methods, such as one that calls the others by name"
            )
        arguments = memory.put_encoded(_serialize.encode_call(args, kwargs, memory.scan, False))
        setup = memory.put(
            ActorSetup(
                _serialize.encode_function(cls, memory.scan and memory.scan()),
                arguments,
                about.copy,
                about.checkpoint,
                about.concurrency,
                _serialize.encode_function(again) if again else b"",  # type: ignore[arg-type]
            )
        )
        ask = functools.partial(
            OpenActor,
            memory.local_id(setup),
            known_of,
            about.class_name,
            about.name,
            about.restarts,
            get_if_exists,
            detached,
            places=about.places,
            env=env,
            demand=demand,
        )
        # Only a node itself can tell which of its resources are free. So each candidate is tried
        # with `only_now` first. If no node has enough, the actor waits on the first candidate.
        numbers = list(nodes) if demand else []
        tries = [(n, True) for n in numbers if len(numbers) > 1] + [(n, False) for n in numbers]
        candidates = iter(tries) if demand else ((one, False) for one in nodes)
        node, only_now = next(candidates)
        while True:
            try:
                hold = take_over(memory, ask(node=node, only_now=only_now), int)
            except errors.NodeLostError:
                if not only_now and node not in self._runtime.channel.call(LeavingNodes()).value:
                    raise
                another = next(candidates, None)
                if another is None:
                    raise
                node, only_now = another
                continue
            known = None if hold is None else self._known(hold)
            if known is not None:
                if not detached:
                    self._opened[hold.oid] = None
                    if len(self._opened) > OPENED_KNOWN_MAX:
                        del self._opened[next(iter(self._opened))]
                return known
            # Reached with get_if_exists if the actor with that name has just exited or could not
            # start.

    def find(self, name: str) -> tuple[ObjectRef[Any], ActorInfo] | None:
        """The running actor with that name, or None."""
        self._runtime.memory.check()
        hold = take_over(self._runtime.memory, FindActor(name), int)
        return None if hold is None else self._known(hold)

    def _known(self, hold: Any) -> tuple[ObjectRef[Any], ActorInfo] | None:
        """A ref to the held identity, and the data in the actor's handles. None if the actor that
        claimed the name could not start."""
        found = self._runtime.memory.read(hold.oid, FOREVER_NS, False)
        if found is None:
            return None
        _, about, identity = found
        return ObjectRef(identity, hold), ActorInfo.of(pickle.loads(about))

    def pool_of(self, identity: ObjectRef[Any], about: ActorInfo) -> int:
        """The pool for the actor's calls on this host. Invariant: the pool's number belongs to the
        actor as long as any process holds the identity."""
        memory = self._runtime.memory
        oid = memory.local_id(identity)
        pool = self._pools.get(oid)
        if pool is None:
            pool = memory.read(oid, FOREVER_NS, False)[0]
            if ids.unpack_id(identity._id)[0] != memory.client.host_id:
                bind = BindActor(oid, pool, about.restarts, about.retries, about.places)
                pool = int(self._runtime.channel.call(bind).value)
                self._runtime.submitter.queues.opened(pool)
            if len(self._pools) > POOLS_KNOWN_MAX:
                self._pools.clear()
            self._pools[oid] = pool
        return pool

    # -- calls ---------------------------------------------------------------------------------

    def submit(
        self,
        identity: ObjectRef[Any],
        about: ActorInfo,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        copy: bool,
        name: str,
        flags: int = 0,
    ) -> Future[Any]:
        """Submits a call. It begins after all earlier calls to the actor by this process."""
        runtime = self._runtime
        runtime.memory.check()
        pool = self.pool_of(identity, about)
        submitter, tasks = runtime.submitter, runtime.tasks
        submitter.queues.order(pool)
        submitter.collector.start()
        why = _REFUSED.get(tasks.pool_state(pool))
        refusal = None if why is None else errors.ActorLostError(f"{title(about)} {why}")
        future: Future[Any] = submitter.submit(
            function,
            args,
            kwargs,
            pool,
            about.retries,
            timeout,
            copy,
            name,
            identity,
            refusal,
            flags,
        )
        return future

    def submit_numbered(
        self,
        identity: ObjectRef[Any],
        about: ActorInfo,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        copy: bool,
        name: str,
        flags: int = 0,
    ) -> Future[Any]:
        """Submits a call to an actor with checkpoints."""
        runtime = self._runtime
        runtime.memory.check()
        oid = runtime.memory.local_id(identity)
        with self._lock:  # numbers must grow in the order of the calls
            if oid not in self._unseen and len(self._unseen) > POOLS_KNOWN_MAX:
                self._unseen = {one: calls for one, calls in self._unseen.items() if calls}
            open_ = self._unseen.setdefault(oid, {})
            number = next(self._turns)
            while open_:
                first = next(iter(open_))
                if not (open_[first] and runtime.tasks.done(open_[first])):
                    break
                del open_[first]
            open_[number] = 0
            try:
                call = CallNumber(self._caller, number, next(iter(open_)))
                future = self.submit(
                    identity, about, function, (call, *args), kwargs, timeout, copy, name, flags
                )
            except BaseException:
                del open_[number]
                raise
            open_[number] = future._oid
        return future

    def handle_dropped(self) -> None:
        """Called when a handle is dropped. Makes the collector process finished calls soon, because
        each finished call holds the actor until then. Acquires no lock, because the garbage
        collector may call this method at any time."""
        if self._runtime.submitter.pending:
            self._runtime.submitter.collector.notice()

    def end(self, identity: ObjectRef[Any], kill: bool) -> None:
        memory = self._runtime.memory
        memory.check()
        self._runtime.channel.call(EndActor(memory.local_id(identity), kill))

    def kill_unheld(self) -> None:
        """Called when the driver leaves its `with` block with an exception. Kills the actors that
        this driver has created, each as soon as it has no holders."""
        if not self._runtime.client.usable:
            return
        for oid in self._opened:
            # The node may be gone, together with its actors.
            with contextlib.suppress(errors.HopliteError):
                self._runtime.channel.tell(EndActor(oid, True, True))

    def restarts(self, identity: ObjectRef[Any]) -> int:
        memory = self._runtime.memory
        memory.check()
        return int(self._runtime.channel.call(ActorRestarts(memory.local_id(identity))).value)


POOLS_KNOWN_MAX = 4096
_REFUSED = {
    POOL_CLOSING: "was closed",
    POOL_LEAVING: "accepts no more calls: its node is leaving the cluster (remove_node)",
}
CALLER_BYTES = 8
# Maximum number of actors that are killed when their driver leaves its `with` block with an
# exception. Older actors exit after their current call. Each entry takes 100 bytes.
OPENED_KNOWN_MAX = 4096


def title(about: ActorInfo) -> str:
    """The actor's name as it appears in errors."""
    name, kind = about.name, about.class_name
    return f"actor {name!r} ({kind})" if name else f"actor {kind}"
