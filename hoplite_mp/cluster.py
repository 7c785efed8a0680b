"""Cluster: the face of the library.

Why it exists: one object in which a user finds everything: put and get, submit and map,
collectives, groups, nodes. It checks arguments and hands on; what it does not do itself stands in
the docstrings of what it calls.
It must never know: shared memory, sockets, processes.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hoplite_mp.actor import ActorCalls
from hoplite_mp.client.entering import enter
from hoplite_mp.client.futures import Future
from hoplite_mp.client.memory import STATE, deadline_ns
from hoplite_mp.client.runtime import Runtime, current_runtime
from hoplite_mp.collectives import CollectiveCalls, as_refs, keep_copies
from hoplite_mp.config import Config, parse_size
from hoplite_mp.ending import Ending
from hoplite_mp.errors import ClosedError, ConfigError
from hoplite_mp.executor import Options, PoolExecutor, TaskExecutor, open_pool, spmd
from hoplite_mp.group import Group
from hoplite_mp.group import join as join_group
from hoplite_mp.nesting import NESTS, as_ref, in_nest
from hoplite_mp.nodes import (
    WORKERS_MAX,
    Looking,
    Node,
    grow,
    list_nodes,
    named_places,
    node_id,
    other_places,
    own_node,
    shrink,
    working_places,
)
from hoplite_mp.planner.resources import amounts_of, amounts_text, parse_amounts
from hoplite_mp.protocol.local import Locate
from hoplite_mp.ref import ObjectRef
from hoplite_mp.store.limits import cpu_count
from hoplite_mp.streaming import StreamCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hoplite_mp.client.far_hosts import FarHosts
    from hoplite_mp.client.launch import Host

__all__ = ["Cluster", "Node", "current"]

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
SPMD_SIZE_MAX = 200


class Cluster(Ending, ActorCalls, CollectiveCalls, Looking, StreamCalls, TaskExecutor):
    """Processes that share immutable objects; a `concurrent.futures.Executor`.

    Args:
        workers: worker processes on this host; None: as many as CPUs this process may use
            (affinity, control group); 0: none.
        memory: limit of this host's store, bytes or "2GiB"; allocated as needed. Default: a third
            of the smaller of RAM and the control group's limit.
        spill_dir: directory on a disk for what does not fit; default: the first suitable of
            TMPDIR, /var/tmp and the working directory.
        resources: what this host has for tasks with `options(resources=)`, such as {"gpu": 2}; with
            address=, this process then joins with a node of its own.
        config: every other limit; an argument here wins over it.

        hosts: names for ssh ("a", "user@b"), on each of which a node is started; it ends with this
            cluster. Config.hosts_command is the command. NodeLostError: one could not be started.
        listen: "host:port" where other hosts can join this cluster; [ ] around IPv6 numbers.
        address: "host:port" of a running cluster. If this host has a node of it (`hoplite-mp up` or
            `join`, or `listen=`, of the same user), this process takes part through that, and
            shares its memory and workers; memory=, ports= and spill_dir= are then that node's.
            Else, or if workers= asks for some, it joins with a node of its own. AuthError,
            ManagerLostError (after Config.connect_timeout_s), ProtocolError.
        ports: "A-B", where this host's node listens for others; default: any free one.
        token: the cluster's secret, or a Path to read it from; else HOPLITE_MP_TOKEN,
            HOPLITE_MP_TOKEN_FILE, ~/.config/hoplite_mp/token (made by who listens).
        tls: False sends everything in the clear.
    """

    _attaches = True  # to a node of this host, if address= has one here
    _stays = False  # this process is there for its node, so other drivers may rely on that
    _standby: tuple[str, ...] = ()  # where another manager may be, as of `hosting`
    submit = TaskExecutor.submit
    map = TaskExecutor.map
    stats, trace = Looking.stats, Looking.trace
    shutdown = Ending.shutdown

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str | None = None,
        hosts: Sequence[str] | None = None,
        listen: str | None = None,
        ports: Any = None,
        token: str | Path | None = None,
        tls: bool | None = None,
        memory: int | str | None = None,
        spill_dir: str | Path | None = None,
        resources: Mapping[str, float] | None = None,
        config: Config | None = None,
    ) -> None:
        if hosts is not None:
            from hoplite_mp.client.far_hosts import checked_hosts

            hosts = checked_hosts(hosts)
        if hosts and address is not None:
            raise ConfigError("hosts= starts nodes of a new cluster, address= joins one: not both")
        if hosts and listen is None:
            listen = "0.0.0.0:0"  # it is advertised as the address that leads to each host
        if workers is not None and (
            isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= 200
        ):
            raise ValueError(f"workers={workers!r}: it must be a number from 0 to 200, or None")
        config = Config.from_environment() if config is None else config
        changes: dict[str, Any] = {}
        if memory is not None:
            changes["memory_bytes"] = parse_size(memory)
        if spill_dir is not None:
            changes["spill_dir"] = str(spill_dir)
        if resources is not None:
            changes["resources"] = amounts_text(amounts_of(resources)) or None
        elif config.resources is not None:
            parse_amounts(config.resources)
        config = dataclasses.replace(config, **changes)
        self._pid = os.getpid()
        self._host: Host | None
        self._host, network = enter(
            workers,
            config,
            listen=listen,
            address=address,
            ports=ports,
            token=token,
            tls=tls,
            attaches=self._attaches and not resources,
            stays=self._stays,
            standby=self._standby,
        )
        self._network = network
        self._join(self._host.runtime)
        if network is None or self._host.workers:  # else others have workers, or will have
            self._runtime.pool_sizes[0] = self._host.workers
        self._shutting = threading.Lock()
        self._far: FarHosts | None = None
        if hosts:
            self._start_far(hosts, config)
        self._keep()

    def _start_far(self, hosts: Sequence[str], config: Config) -> None:
        """Nodes on other hosts; returns when all have joined."""
        from hoplite_mp.client.far_hosts import FarHosts

        network = self._network
        assert network is not None
        before = len(self.nodes)
        try:
            self._far = FarHosts(
                {host: network.address_for(host) for host in hosts},
                config.hosts_command,
                network.token.reveal(),
                network.tls,
            )
            self._far.wait(lambda: len(self.nodes) - before, config.hosts_wait_s)
        except BaseException:
            self._end()
            raise

    def _join(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._options = Options()
        self._pool = runtime.own_pool
        runtime.face = weakref.ref(self)

    @property
    def address(self) -> str | None:
        """Where others can join ("ip:port"); None if this cluster is of one host."""
        return None if self._network is None else self._network.address

    @property
    def token_file(self) -> Path | None:
        """The file with the token that others need, if it came from one."""
        return None if self._network is None else self._network.token.file

    @classmethod
    def _of(cls, runtime: Runtime) -> Cluster:
        """The face of a runtime that was made elsewhere (in a worker)."""
        if runtime.face is None:
            face = cls.__new__(cls)
            face._host = face._network = face._far = None
            face._shutting = threading.Lock()
            face._join(runtime)
            runtime.face = lambda: face  # a worker's lives as long as the worker
        found = runtime.face()
        if found is None:
            raise ClosedError("this cluster ends: nobody holds it any more")
        return found  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:  # where it arrives it is current(), so viewed
        return _arrived, (self._options,)

    # -- objects -------------------------------------------------------------------------------

    def put(self, value: T, copies: int = 1) -> ObjectRef[T]:
        """Stores an immutable value: arrays and other buffers are copied in once, out never.

        Waits up to Config.put_wait_s for room, then StoreFullError; at once for more than the
        limit. An array of `empty()` is published without a copy and becomes read-only.

        copies: on how many nodes it is then held, this one among them, so that it outlives the
        death of one less; it returns when all have it, others in place of those that die meanwhile.
        ValueError: there are fewer nodes. A copy that is lost later is not replaced.
        """
        to = other_places(self._runtime, copies)
        ref = self._runtime.memory.put(value)
        keep_copies(self._runtime, ref, copies, to)
        return ref

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Array:
        """A writable array inside the store, uninitialised. `put(a)`, or returning it from a task,
        publishes it without a copy and makes it read-only; never published, it is freed with the
        last array over it. Views of it that were made before stay writable: do not use them."""
        return self._runtime.memory.empty(shape, dtype, order)

    def get(self, refs: Any, timeout: float | None = None, copy: bool = False) -> Any:
        """The value of a ref or Future, or a list for several, in order; read-only. Any nesting of
        list, tuple and dict (these very types) gives the same nesting of values.

        Raises the first failure in that order: the task's own exception, CancelledError,
        ObjectLostError, ReduceError; HopliteTimeoutError after `timeout` seconds (0 polls).
        copy=True: writable copies.
        """
        memory = self._runtime.memory
        memory.check()
        deadline = deadline_ns(timeout)

        def read(ref: ObjectRef[Any]) -> Any:
            return memory.read(memory.local_id(ref), deadline, copy)

        if isinstance(refs, (ObjectRef, Future)):
            (ref,) = as_refs(refs)
            return read(ref)
        if type(refs) not in NESTS:
            return [read(ref) for ref in as_refs(refs)]
        return in_nest(in_nest(refs, as_ref), read)  # all are refs before anything is waited for

    def wait(
        self, refs: Any, num: int | None = None, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """(done, not done), each in the given order; returns when `num` (default: all) are done,
        ready or failed, or at the timeout."""
        memory, submitter = self._runtime.memory, self._runtime.submitter
        memory.check()
        given = [refs] if isinstance(refs, (ObjectRef, Future)) else list(refs)
        oids = [memory.local_id(ref) for ref in as_refs(given)]
        wanted = len(oids) if num is None else num
        if not 0 <= wanted <= len(oids):
            raise ValueError(f"num={num!r}: it must be from 0 to the number of refs, {len(oids)}")
        if wanted:
            submitter.waiting.wait_many(oids, wanted, deadline_ns(timeout))
        flags = [submitter.tasks.done(oid) for oid in oids]
        done = [ref for ref, flag in zip(given, flags, strict=True) if flag]
        return done, [ref for ref, flag in zip(given, flags, strict=True) if not flag]

    def delete(self, refs: Any) -> None:
        """Drops objects now: later gets fail with ObjectLostError. Arrays in use keep their memory;
        tasks and reductions that still need a ref see a failed source."""
        memory = self._runtime.memory
        memory.check()
        for ref in as_refs(refs):
            memory.delete(ref)

    def locations(self, ref: Any) -> list[str]:
        """Ids of the nodes that hold the whole value."""
        memory = self._runtime.memory
        memory.check()
        (one,) = as_refs(ref)
        oid = memory.local_id(one)
        if memory.client.state(oid) not in _HELD:
            return []
        return [node_id(number) for number in self._runtime.channel.call(Locate(oid)).value]

    # -- tasks ---------------------------------------------------------------------------------

    def options(self, **changes: Any) -> Cluster:
        """A view of this cluster with other defaults for submit, map and executor.

        node: a node, its id, or a list of them, to run on and nowhere else. retries: how often a
        task is run again after the death of its worker, never after an exception. timeout: seconds
        of running, then the worker is killed and the task fails with HopliteTimeoutError. copy:
        results, and values of refs among the arguments, are writable. name: shown in errors.
        concurrency: how many `async def` tasks one worker runs at a time, or calls its actor.
        buffersize: how many items a stream may be ahead of its reader. priority: of tasks that are
        ready, higher ones begin first, also before those of other programs; a task that is sent by
        a task counts at least as much as that one. resources: {"gpu": 1} runs where that much is
        free, and has it as long as it runs; `assigned` says which. ValueError at the call: no node
        has it; NodeLostError: those that had it are gone, and no other has come within
        Config.resource_wait_s. Of executor and spmd each worker has it for life, and of an actor
        its process; CUDA_VISIBLE_DEVICES names its "gpu" there. What only actors have stands at
        `actor`. Later options override; unknown names are a TypeError.
        """
        return self._view(self._options.override(self._resolved(changes)))

    def _view(self, options: Options) -> Cluster:
        view = _View.__new__(_View)
        view.__dict__.update(self.__dict__)
        view._options = options
        view._base = self._base if isinstance(self, _View) else self
        return view

    def executor(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        **options: Any,
    ) -> PoolExecutor:
        """An Executor with workers of its own; they end at its shutdown.

        node: where they are, a node or several that share them evenly; None: this host.
        max_workers: None: as many as CPUs here, or as those nodes have workers.
        """
        self._runtime.memory.check()
        places = named_places(self._runtime, options.pop("node", None), self._options.node)
        wanted = self._options.override(options)
        if max_workers is None:
            max_workers = min(WORKERS_MAX, sum(n for _, n in places) or cpu_count())
            if wanted.resources is not None:
                numbers = [number for number, _ in places]
                max_workers = self._runtime.demands.most_workers(
                    wanted.resources, max_workers, numbers
                )
        made = open_pool(
            self._runtime,
            max_workers,
            initializer,
            initargs,
            max_tasks_per_child,
            dataclasses.replace(wanted, node=None),
            [number for number, _ in places],
        )
        made._cluster = self
        return made

    def spmd(
        self, fn: Callable[..., T], size: int, *args: Any, node: Any = None
    ) -> list[Future[T]]:
        """`size` peers in processes of their own, all at once: `fn(rank, *args)`. Refs among args
        arrive as values, as for `submit`; `by_ref(ref)` hands a ref over.
        node: where they are, a node or several; None: all that have workers, in proportion. One
        that dies begins again like any task (`options(retries=0)`: it does not), and may join its
        Group again as long as that lives.
        """
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= SPMD_SIZE_MAX:
            raise ValueError(f"size={size!r}: it must be from 1 to {SPMD_SIZE_MAX}")
        self._runtime.memory.check()
        places = named_places(self._runtime, node, self._options.node)
        weights = [(number, 1) for number, _ in places]
        if self._options.resources is None:
            weights = weights or working_places(self._runtime)
        options = dataclasses.replace(self._options, node=None)
        return spmd(self._runtime, options, fn, size, args, weights)

    def group(
        self,
        name: str,
        size: int,
        rank: int | None = None,
        *,
        strict: bool = False,
        timeout: float | None = None,
    ) -> Group:
        """Becomes a member of the Group `name`; the first call waits for all `size`.

        rank=None takes the lowest free one. timeout: seconds for each call (None: as long as the
        peers live; a group that does not fill raises after Config.group_wait_s). ValueError: wrong
        size, taken rank, one too many. PeerLostError: its process died, and the others have left.
        """
        member = join_group(self._runtime, name, size, rank, strict, timeout)
        member._cluster = self
        return member

    # -- looking -------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """Living nodes in order of joining."""
        return list_nodes(self._runtime, memory=True)

    @property
    def assigned(self) -> dict[str, list[int]]:
        """In a task with `resources=`, or in an executor's worker or an actor that has some: which
        ones it has been given, by name, as indices on its host, from 0: {"gpu": [0, 1]}. For a
        fraction, the index that it shares; for an amount that has no indices (of a total that is no
        whole number, or above 1024) an empty list. Elsewhere {}."""
        return self._runtime.demands.assigned()

    @property
    def here(self) -> Node:
        """The node of this process: in a task, of the worker that runs it."""
        return own_node(self._runtime)

    def add_workers(self, n: int, node: Any = None) -> None:
        """`n` workers more for the cluster's tasks, on this host or on `node`, while work runs."""
        grow(self._runtime, n, node)

    def remove_node(self, node: Any) -> None:
        """Lets a node, or several, leave in order, and returns when they are gone.

        It takes no more tasks; what runs there is run to its end, results that only it holds are
        fetched by others. Its actors finish the calls made so far; later ones raise ActorLostError.
        Objects that were `put` on it are lost with it, unless copies are elsewhere.
        `hoplite-mp join` ends there with exit code 0; a program that is connected through that node
        loses its cluster. ValueError: that of the manager, with which the whole cluster would end,
        and the caller's own, which leaves by `shutdown`.
        """
        shrink(self._runtime, node)


class ApartCluster(Cluster):
    """With a node of its own in any case: who measures the network from this host needs one."""

    _attaches = False


class _View(Cluster):
    """What options() returns: shutting it down shuts its cluster down."""

    _base: Cluster

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._base.shutdown(wait, cancel_futures=cancel_futures)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self._closed = self._base._closed
        return super().submit(fn, *args, **kwargs)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        return self._base.__exit__(kind, value, traceback)


_HELD = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])


def _arrived(options: Options) -> Cluster:
    """Named in streams: the cluster, or a view of it, where it has come to."""
    cluster = current()
    return cluster if options == cluster._options else cluster._view(options)


def current() -> Cluster:
    """Inside a task the same cluster; elsewhere the innermost open one, else ClosedError."""
    return Cluster._of(current_runtime())
