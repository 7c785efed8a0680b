"""Actors as one process sees them: opening, finding, calling.

Why it exists: a handle is a ref to the actor's identity and what is known of its class; this file
asks the node for identities, and turns calls into tasks of the actor's own pool, which the
submitter keeps in order.
It must never know: what a handle looks like to a user, how a process is started.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from hoplite_mp import errors, ids, serial
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.client.taking import take_over
from hoplite_mp.protocol.actors import (
    ActorRestarts,
    BindActor,
    EndActor,
    FindActor,
    OpenActor,
)
from hoplite_mp.protocol.local import POOL_LEAVING, LeavingNodes
from hoplite_mp.ref import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.client.futures import Future
    from hoplite_mp.client.ports import Membership
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.protocol.birth import Environment

__all__ = ["About", "ActorSetup", "Actors"]

POOL_CLOSING = 2
RETRIES = 0  # of a call, unless it is told otherwise: an actor's state may have changed


class About(NamedTuple):
    """What every handle of an actor knows."""

    class_name: str
    name: str
    methods: frozenset[str]
    retries: int
    timeout: float | None
    copy: bool
    restarts: int
    places: tuple[int, ...]  # numbers of the nodes to which it is bound; none: any
    checkpoint: int  # its state is kept after so many calls; 0: never
    asyncs: frozenset[str] = frozenset()  # methods that are `async def`
    streams: frozenset[str] = frozenset()  # methods that yield
    concurrency: int = 1
    buffersize: int | None = None


class ActorSetup(NamedTuple):
    """What an actor's process makes its object from, each time that it begins."""

    constructor: bytes
    arguments: ObjectRef[Any]
    copy: bool
    checkpoint: int
    concurrency: int = 1
    again: bytes = b""  # exceptions of its calls that count against `retries`


class CallNumber(NamedTuple):
    """Of a call of an actor with checkpoints: by it a call that is tried again is known."""

    caller: bytes  # the process
    turn: int  # among its calls of such actors
    seen: int  # it has the results of all before this one


class Actors:
    """The actors that one process knows."""

    def __init__(self, runtime: Membership) -> None:
        self._runtime = runtime
        self._pools: dict[int, int] = {}  # identity's local id -> its pool
        self._lock = threading.RLock()  # pickling arguments may call actors
        self._opened: dict[int, None] = {}  # local ids of the last ones made here, undetached
        self._caller = os.urandom(CALLER_BYTES)
        # Of calls of actors with checkpoints. Never used twice, whatever is forgotten below.
        self._turns = itertools.count(1)
        # Identity's local id -> those whose results are not known to be here, by their number, with
        # the local id of the task (0: not sent yet).
        self._unseen: dict[int, dict[int, int]] = {}

    # -- identities ----------------------------------------------------------------------------

    def open(
        self,
        cls: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        about: About,
        get_if_exists: bool,
        detached: bool,
        nodes: Iterator[int],
        env: Environment = (),
        again: tuple[type[Exception], ...] = (),
        demand: Demand = (),
    ) -> tuple[ObjectRef[Any], About]:
        """A new actor on the first of these nodes that does not leave the cluster, with a `demand`
        on the first that can meet it now, if there is one; or the one of that name, with what its
        own handles know. NodeLostError: that one is gone, or all leave."""
        memory = self._runtime.memory
        memory.check()
        arguments = memory.put_encoded(serial.encode_call(args, kwargs))
        setup = memory.put(
            ActorSetup(
                serial.encode_function(cls),
                arguments,
                about.copy,
                about.checkpoint,
                about.concurrency,
                serial.encode_function(again) if again else b"",  # type: ignore[arg-type]
            )
        )
        ask = functools.partial(
            OpenActor,
            memory.local_id(setup),
            pickle.dumps(tuple(about), 5),
            about.class_name,
            about.name,
            about.restarts,
            get_if_exists,
            detached,
            places=about.places,
            env=env,
            demand=demand,
        )
        # What a node has given to others, only that node knows: each is asked whether there is room
        # now, and if there is none anywhere the actor waits on the first.
        asked = list(nodes) if demand else []
        tried = [(one, True) for one in asked if len(asked) > 1] + [(one, False) for one in asked]
        candidates = iter(tried) if demand else ((one, False) for one in nodes)
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
            # With get_if_exists: the actor that had the name has just ended, or could not begin.

    def find(self, name: str) -> tuple[ObjectRef[Any], About] | None:
        """The living actor of that name."""
        self._runtime.memory.check()
        hold = take_over(self._runtime.memory, FindActor(name), int)
        return None if hold is None else self._known(hold)

    def _known(self, hold: Any) -> tuple[ObjectRef[Any], About] | None:
        """A ref to that identity, and what its handles know. None: the actor that had asked for the
        name could not begin, and nobody became it."""
        said = self._runtime.memory.read(hold.oid, FOREVER_NS, False)
        if said is None:
            return None
        _, about, identity = said
        return ObjectRef(identity, hold), About(*pickle.loads(about))

    def pool_of(self, identity: ObjectRef[Any], about: About) -> int:
        """The pool of that actor's calls on this host. Its number stays the actor's own as long as
        anybody holds the identity."""
        memory = self._runtime.memory
        oid = memory.local_id(identity)
        pool = self._pools.get(oid)
        if pool is None:
            pool = memory.read(oid, FOREVER_NS, False)[0]
            if ids.unpack_id(identity._id)[0] != memory.client.home:
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
        about: About,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        copy: bool,
        name: str,
        flags: int = 0,
    ) -> Future[Any]:
        """A call, behind all that this process has made before."""
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
        about: About,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        copy: bool,
        name: str,
        flags: int = 0,
    ) -> Future[Any]:
        """A call of an actor with checkpoints."""
        runtime = self._runtime
        runtime.memory.check()
        oid = runtime.memory.local_id(identity)
        with self._lock:  # numbers grow in the order of the calls
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
        """Takes no lock: the garbage collector may call it anywhere."""
        if self._runtime.submitter.pending:
            self._runtime.submitter.collector.notice()

    def end(self, identity: ObjectRef[Any], kill: bool) -> None:
        memory = self._runtime.memory
        memory.check()
        self._runtime.channel.call(EndActor(memory.local_id(identity), kill))

    def kill_unheld(self) -> None:
        """This driver leaves by an exception: the actors that it has made and that nobody else
        holds are killed when it has gone."""
        if not self._runtime.client.usable:
            return
        for oid in self._opened:
            with contextlib.suppress(errors.HopliteError):  # the node is gone, and they are
                self._runtime.channel.tell(EndActor(oid, True, True))

    def restarts(self, identity: ObjectRef[Any]) -> int:
        memory = self._runtime.memory
        memory.check()
        return int(self._runtime.channel.call(ActorRestarts(memory.local_id(identity))).value)


POOLS_KNOWN_MAX = 4096
_REFUSED = {
    POOL_CLOSING: "was closed",
    POOL_LEAVING: "takes no more calls: its node leaves the cluster (remove_node)",
}
CALLER_BYTES = 8
# Actors that are killed when the `with` of the driver that made them is left by an exception. Those
# made before these end after the call that they run. 100 bytes for each.
OPENED_KNOWN_MAX = 4096


def title(about: About) -> str:
    """As errors name the actor."""
    name, kind = about.name, about.class_name
    return f"actor {name!r} ({kind})" if name else f"actor {kind}"
