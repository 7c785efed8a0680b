"""The Runtime: one process's membership in a cluster, in drivers and workers alike.

A Runtime contains the store, the task table, the connection to the node, and the identity of this
process. `Cluster` is its public API. `hoplite_mp.current()` returns the innermost open Cluster.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _shm, _tasks
from hoplite_mp._client.actors import ActorClient
from hoplite_mp._client.calls import current_call
from hoplite_mp._client.demands import Demands
from hoplite_mp._client.describing import ref_words
from hoplite_mp._client.foreign_refs import ForeignRefs, enter_by_engine, held_too_short
from hoplite_mp._client.futures import Future
from hoplite_mp._client.memory import FORKED, Memory
from hoplite_mp._client.queues import HERE
from hoplite_mp._client.submitter import Submitter
from hoplite_mp._common import locks
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import CANCELLED, KIND_OPERATION
from hoplite_mp._common.ref import ObjectRef, runtime_hooks
from hoplite_mp._protocol.local import BindPool, Collective
from hoplite_mp.errors import ClosedError, HopliteError, ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hoplite_mp._client.channel import Channel
    from hoplite_mp.config import Config

__all__ = ["Runtime", "current_runtime", "runtime_of"]

_stack: list[Runtime] = []
_stack_lock = locks.lock("client.runtimes")


def _forked() -> None:
    """Replaces the lock in a forked child, because a thread that does not exist there may hold
    it."""
    global _stack_lock
    _stack_lock = locks.lock("client.runtimes")


os.register_at_fork(after_in_child=_forked)


class Runtime:
    """The state that a process needs to take part in a cluster."""

    def __init__(
        self,
        control_fd: int,
        store_fd: int,
        event_fd: int,
        slot: int,
        channel: Channel,
        config: Config,
        label: str,
        hidden: bool = False,
    ) -> None:
        """hidden: whether `current_runtime()` never returns this Runtime."""
        self.hidden = hidden
        self.client = _shm.Client(control_fd, store_fd, slot, event_fd)
        self.tasks = _tasks.Tasks(self.client)
        self.channel = channel
        self.config = config
        self._label = label
        self.memory = Memory(self.client, channel, config)
        self.submitter = Submitter(self.memory, self.tasks)
        self.memory.wait_one = self.submitter.waiting.wait_done
        self.memory.pending, self.memory.ended = self.submitter.pending, self.submitter.ended
        self.memory.wait_moved = self.submitter.waiting.wait_moved
        self.memory.drain = self.submitter.drain
        self.memory.failure_read = self.submitter.failures.read
        self.actors = ActorClient(self)
        # In a worker in the common pool: runs this worker's tasks from worker broadcasts
        # (`Cluster.run`). Called while a task in this worker is waiting for a broadcast. Otherwise
        # two such tasks would wait for each other indefinitely.
        self.take_part: Callable[[], None] | None = None
        self.demands = Demands(self)
        self.running = 0  # local id of the running task with resources, if it runs alone
        self.own_pool = 0  # the pool whose tasks this process may run while it waits
        self.is_actor = False  # whether `own_pool` belongs to an actor
        # The Cluster for this runtime, created when first needed. In a driver, a weak reference
        # that must be called, because the Cluster exists only as long as the user refers to it.
        self.face: Any = None
        # Set in processes that take part for another engine.
        self.foreign: ForeignRefs | None = None
        self.dropped = False  # the user has dropped the Cluster; closed once nothing is pending
        self.setups: list[Any] = []  # initializers of pools; dropped when the cluster is closed
        self.pool_sizes: dict[int, int] = {}
        self.newest_node = 0  # the highest known node number
        self.bound: dict[int, int] = {}  # node number -> the pool for tasks on that node
        # Functions to call at the end of the running task if only one task runs at a time.
        self.process_leaves: list[Any] = []
        self.life: Any = None  # see _sync/sync_actors.py; created when first needed
        with _stack_lock:
            _stack.append(self)

    def work_for_an_engine(self, ref_hold_s: float, passes_on: bool = False) -> None:
        """Marks this process as part of another engine. When a ref is pickled outside this library,
        the node then holds the object for `ref_hold_s`, because the engine may take that long to
        deliver the ref. passes_on: see ForeignRefs."""
        if self.foreign is None:
            number = lambda: self.tasks.node_number  # noqa: E731
            self.foreign = ForeignRefs(self.memory, number, ref_hold_s, passes_on)

    def replace(self, former: Runtime) -> None:
        """Gives this runtime the position of `former` in the order of opening."""
        with _stack_lock:
            if former in _stack:
                _stack.remove(self)
                _stack.insert(_stack.index(former), self)

    @property
    def is_over(self) -> bool:
        """Whether the node is lost, but an engine may let this process join again, or join another
        cluster."""
        return self.foreign is not None and self.memory.lost is not None

    @property
    def label(self) -> str:
        """ "driver" or "worker 3@h0"."""
        if self._label.endswith("@h"):  # the node's number is known only after it has joined
            return f"{self._label}{self.tasks.node_number}"
        return self._label

    @property
    def node_name(self) -> str:
        """ "h0": the node through which this process takes part."""
        return f"h{self.tasks.node_number}"

    @property
    def task_leaves(self) -> list[Any]:
        """Functions to call at the end of the running task."""
        call = current_call.get()
        return self.process_leaves if call is None else call.leaves

    @task_leaves.setter
    def task_leaves(self, leaves: list[Any]) -> None:
        call = current_call.get()
        if call is None:
            self.process_leaves = leaves
        else:
            call.leaves = leaves

    def bound_pool(self, node: int) -> int:
        """The pool whose tasks run only on that node. Raises NodeLostError if the node is gone."""
        if node == self.tasks.node_number:
            return self.bound.setdefault(node, HERE)
        pool = self.bound.get(node)
        if pool is None:
            pool = self.bound[node] = int(self.channel.call(BindPool(node)).value)
            self.submitter.queues.opened(pool)
        return pool

    def collective(
        self,
        sources: Sequence[ObjectRef[Any]],
        kind: str,
        op: str,
        num: int,
        deadline_s: float | None,
        reproducible: bool,
        slices: int,
        to: Sequence[int] = (),
        one_of: list[list[int]] | None = None,
    ) -> list[_shm.Hold]:
        """Passes a collective operation to the node. Returns a hold on each result (one for each
        slice)."""
        self.memory.check_lost()
        named = len(sources) + (slices if slices > 1 else 0)
        if named > (most := self.config.collective_refs_max):
            raise ValueError(
                f"{kind} of {named} refs: one operation takes at most {most} "
                f"(Config.collective_refs_max); {kind} groups of the refs, then the results"
            )
        oids = [self.memory.local_id(ref) for ref in sources]
        for oid in oids:
            self.submitter.failures.read(oid)
        shared = list(sources)
        holds = []
        try:
            for _ in range(slices):
                holds.append(self.client.draft(KIND_OPERATION))
            results = [hold.oid for hold in holds]
            for oid in results:
                self.submitter.expect(oid, None, [shared, self.client.hold(oid)])
            ask = Collective(
                results, oids, kind, op, num, deadline_s, reproducible, list(to), one_of or []
            )
            self.channel.tell(ask)
            for hold in holds:
                hold.keep()
            if self.foreign is not None:  # an engine's process may not call again for a long time
                self.submitter.collector.look_soon()
        except BaseException:  # for example Ctrl-C: the node may not have received the request
            for hold in holds:
                self.tasks.cancel(hold.oid, True)
            self.submitter.drain()
            raise
        return holds

    def operation_future(self, hold: _shm.Hold) -> Future[None]:
        """A Future for an operation's result."""
        oid = hold.oid
        future: Future[None] = Future(self.submitter, oid, hold, False)
        future._reports = False
        pending = self.submitter.pending.get(oid)
        if pending is not None:
            pending.future = future
        # The operation may have completed, or the node may have been lost, before the Future was
        # registered above. The thread that handled this event could then not settle the Future.
        if self.tasks.done(oid):
            future._complete(self.client.state(oid) in CANCELLED)
        elif self.memory.lost is not None:
            future._settle(False, True, self.memory.lost_again())
        return future

    def close(self) -> None:
        """Leaves the cluster. Mapped memory stays readable. The caller must then call
        `Submitter.call_back_at_end` without holding a lock."""
        error = ClosedError("the cluster was closed before this was done")
        if self.memory.lost is None:
            # Set first: a thread that submits a task now either finds this error, or has registered
            # the task in time for `fail_pending` below to fail it.
            self.memory.lost = error
        self.submitter.stop()
        with _stack_lock:
            if self in _stack:
                _stack.remove(self)
        self.client.close()
        self.tasks.lose()  # wakes waiting threads, which then raise ClosedError
        for leave in list(self.task_leaves):
            leave(True)  # stops the Groups' threads, whose waits have just failed
        self.submitter.fail_pending(error)
        self.channel.close()
        # Breaks cycles that would keep the mappings until the garbage collector happens to run.
        self.memory.wait_one = _closed
        self.memory.wait_moved = _gone
        self.memory.drain = _nothing
        self.memory.failure_read = lambda oid: None
        self.memory.pending, self.memory.ended = (), lambda oid: None
        self.memory.scan = None
        self.memory.await_lost = _nothing
        self.memory.print_lines = None
        self.face = None
        self.setups.clear()  # frees arguments of initializers, such as locks, immediately


def current_runtime() -> Runtime:
    """The innermost open Runtime in this process. If none is open, or all have lost their nodes, an
    engine may first let this process join a cluster. Otherwise returns a Runtime that has lost its
    node, or raises ClosedError if there is none."""
    found = _innermost()
    if found is None or found.is_over:
        if enter_by_engine():
            found = _innermost() or found
        if found is None:
            raise ClosedError(
                FORKED
                if any(runtime.client.forked and not runtime.hidden for runtime in _stack)
                else "no cluster is open in this process: open one with hoplite_mp.Cluster()"
            )
    return found


def _innermost() -> Runtime | None:
    """The innermost Runtime that is not hidden and has not lost its node. If there is none, the
    innermost Runtime that an engine may connect to a new node."""
    over = None
    for runtime in reversed(_stack):
        if runtime.client.usable and not runtime.dropped and not runtime.hidden:
            if not runtime.is_over:
                return runtime
            over = over or runtime
    return over


def runtime_of(ref: ObjectRef[Any]) -> Runtime:
    """The Runtime that owns this ref's hold. ClosedError: the Runtime has been closed."""
    host_id = getattr(ref._hold, "host_id", 0)
    for runtime in reversed(_stack):
        if runtime.client.usable and runtime.client.host_id == host_id:
            return runtime
    if not host_id:
        raise ObjectLostError(f"{ref} is gone, or its cluster is not open in this process")
    for runtime in reversed(_stack):
        if runtime.client.host_id == host_id:
            runtime.memory.check()  # raises a different error in a forked process
    raise ClosedError("the cluster of this object is closed")


def _closed(oid: int, deadline: int) -> None:
    raise ClosedError("this cluster is closed")


def _gone(oid: int, deadline: int) -> bool:
    raise ClosedError("this cluster is closed")


def _nothing() -> None:
    pass


def _owner(object_id: bytes) -> Memory | None:
    host_id = int.from_bytes(object_id[:8], "little")
    usable = [runtime for runtime in reversed(_stack) if runtime.client.usable]
    for runtime in usable:
        if runtime.client.host_id == host_id:
            return runtime.memory
    # If the ref is valid, its object belongs to another host. A hidden cluster has no other hosts.
    usable.sort(key=lambda runtime: (runtime.is_over, runtime.hidden))
    return usable[0].memory if usable else None


def _contributors(ref: ObjectRef[Any]) -> tuple[int, ...] | None:
    memory = _owner(ref._id)
    try:
        return None if memory is None else memory.contributors(ref)
    except ObjectLostError:  # deleted, or from a cluster that is not open here
        return None


def _entered(object_id: bytes) -> Memory | None:
    """Like `_owner`, but another engine may first make this process join a cluster."""
    memory = _owner(object_id)
    host_id = int.from_bytes(object_id[:8], "little")
    if memory is not None and (memory.lost is None or memory.client.host_id == host_id):
        return memory
    return _owner(object_id) if enter_by_engine() else memory


def _attach(object_id: bytes) -> object:
    memory = _entered(object_id)
    if memory is None:
        return None
    memory.attached += 1
    return memory.make_ref(object_id)._hold


def _attach_held(object_id: bytes, node: int, seconds: float) -> object:
    memory = _entered(object_id)
    if memory is None:
        return None
    runtime = next(one for one in reversed(_stack) if one.memory is memory)
    passes_on = runtime.foreign is not None and runtime.foreign.passes_on
    try:
        hold = _attach(object_id)
    except HopliteError:  # this process has just lost its node
        if passes_on:
            return None
        raise
    if hold is None and not passes_on:
        raise held_too_short(ObjectRef(object_id), node, seconds)
    return hold


def _hold_for(ref: ObjectRef[Any]) -> tuple[int, float] | None:
    host_id = getattr(ref._hold, "host_id", 0)
    for runtime in reversed(_stack):
        if runtime.client.usable and runtime.client.host_id == host_id:
            return None if runtime.foreign is None else runtime.foreign.hold_for(ref)
    return None


def _awaited(ref: ObjectRef[Any]) -> Generator[Any, None, Any]:
    from hoplite_mp._client.awaiting import value_of

    return value_of(runtime_of(ref).submitter, ref).__await__()


def _words(ref: ObjectRef[Any]) -> str:
    memory = _owner(ref._id)
    for runtime in list(_stack):
        if runtime.memory is memory:
            # Another thread may just have closed the cluster, and printing a ref must not raise an
            # error.
            with contextlib.suppress(Exception):
                return ref_words(runtime, ref)
    return ""


def _fetch(object_id: bytes) -> Any:
    memory = _owner(object_id)
    if memory is None:
        forked = any(runtime.client.forked for runtime in _stack)
        why = FORKED if forked else "no cluster is open in this process"
        raise ClosedError(f"{why}; its arrays cannot be read")
    ref = memory.make_ref(object_id)  # holds the object while it is read
    return memory.read(memory.local_id(ref), FOREVER_NS, False)


_serialize.fetching.fetch = _fetch
_shm.closed_error = ClosedError
runtime_hooks.contributors = _contributors
runtime_hooks.description = _words
runtime_hooks.attach = _attach
runtime_hooks.attach_held = _attach_held
runtime_hooks.hold_for = _hold_for
runtime_hooks.awaited = _awaited
_serialize.register_future_type(Future)
