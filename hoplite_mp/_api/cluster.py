"""Cluster: the object through which programs use the library.

One object has all methods: put and get, submit and map, collectives, groups, nodes. Each base class
provides some of the methods. The methods check their arguments and call the internal modules.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._api.actor import ActorCalls
from hoplite_mp._api.collectives import CollectiveCalls, GroupCalls
from hoplite_mp._api.executor import COMMON_POOL, Options, TaskExecutor
from hoplite_mp._api.nodes import Node, NodeCalls
from hoplite_mp._api.objects import ObjectCalls
from hoplite_mp._api.pools import PoolCalls
from hoplite_mp._api.run_on_workers import RunOnWorkersCalls
from hoplite_mp._api.shutdown import ClusterShutdown
from hoplite_mp._api.streams import StreamCalls
from hoplite_mp._client.demands import WORKERS_MAX
from hoplite_mp._client.memory import whole
from hoplite_mp._client.runtime import Runtime, current_runtime
from hoplite_mp._common import locks
from hoplite_mp._planner.resources import amounts_of, amounts_text, parse_amounts
from hoplite_mp.config import Config, parse_size
from hoplite_mp.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.launch import HostProcesses
    from hoplite_mp._client.network import RemoteHosts

__all__ = ["Cluster", "Node", "current"]

T = TypeVar("T")
_turns = itertools.count()  # distributes tasks among the nodes in `options(node=)`


class Cluster(
    ClusterShutdown,
    ActorCalls,
    CollectiveCalls,
    RunOnWorkersCalls,
    GroupCalls,
    NodeCalls,
    ObjectCalls,
    PoolCalls,
    StreamCalls,
    TaskExecutor,
):
    """Processes that share immutable objects; a `concurrent.futures.Executor`.

    Parameters
    ----------
    workers : int, optional
        The number of worker processes on this host, 0 to 200. Default: the number of CPUs that
        this process may use (affinity, control group).
    address : str, optional
        "host:port" of a running cluster, which this process joins. If the same user runs a node of
        that cluster on this host (`hoplite-mp up` or `join`, or `listen=`), this process attaches
        to the node, and shares its memory and workers; then, `memory`, `ports` and `spill_dir` have
        no effect. Otherwise, or if `workers` is given and not 0, this process starts a new node.
    hosts : sequence of str, optional
        Names for ssh ("a", "user@b"). `Config.hosts_command` starts a node on each host. The nodes
        stop when this cluster shuts down.
    listen : str, optional
        "host:port" at which other hosts can join this cluster; put IPv6 addresses in [ ].
    ports : str, optional
        "A-B": the range of ports at which this host's node listens for other nodes. Default: any
        free port.
    token : str or pathlib.Path, optional
        The cluster's secret, or the file to read it from. Default: HOPLITE_MP_TOKEN, then the file
        HOPLITE_MP_TOKEN_FILE, then ``~/.config/hoplite_mp/token``. A cluster that listens creates
        that file if it is missing.
    tls : bool, optional
        False sends all data between hosts unencrypted. Default: encrypted.
    memory : int or str, optional
        Limit of this host's store, in bytes or as "2GiB". Memory is allocated on demand. Default: a
        third of the RAM, or of the control group's limit if that is smaller.
    spill_dir : str or pathlib.Path, optional
        Directory on a disk for objects that do not fit into memory; it must exist. Default: the
        first suitable of TMPDIR, /var/tmp and the working directory.
    resources : dict, optional
        Resources of this host for `options(resources=)`, such as ``{"gpu": 2}``. With `address`,
        this process then starts a new node. Default: none.
    config : Config, optional
        All other limits. Arguments of this call take precedence over it.
    debug : bool, optional
        True: `submit` and `map` run their tasks immediately, in the calling process, one after
        another, for pdb, coverage and profilers. Refs among the arguments are replaced by their
        values; other arguments are not copied. `timeout`, `node` and `resources` have no effect on
        these tasks. Actors, `spmd`, `stream`, `run` and executors still use other processes.
        Default: False.

    Raises
    ------
    ConfigError
        Two arguments exclude each other, or a limit is out of range.
    AuthError
        `address`: the cluster has a different token.
    ManagerLostError
        `address`: no manager answered for `Config.connect_timeout_s` seconds.
    ProtocolError
        `address`: another version of this library, or another program, answers.
    NodeLostError
        `hosts`: a node could not be started.

    Notes
    -----
    The end of the `with` block waits for all submitted tasks. If the block ends with
    an exception, waiting tasks are cancelled and running tasks are interrupted; workers whose
    tasks are still running after `Config.cancel_grace_s` are killed. Actor calls are not
    interrupted: an actor whose call is still running after this time is killed, without running
    `finally` blocks.

    Examples
    --------
    >>> with hoplite_mp.Cluster(workers=1) as small:
    ...     future = small.submit(pow, 2, 10)
    ...     print(future.result())
    1024
    """

    __module__ = "hoplite_mp"  # as users import it

    _attaches = True  # attaches to this host's node of the cluster at address=, if any
    _joins = True  # starts a new node, if this host has no node of that cluster
    _hidden = False  # True: `current()` never returns it
    _stays = False  # True: this process only runs a node, so other drivers may attach to the node
    _standby: tuple[str, ...] = ()  # addresses at which another manager may be: see up_join.py

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
        debug: bool = False,
    ) -> None:
        if hosts is not None:
            from hoplite_mp._client.network import checked_hosts

            hosts = checked_hosts(hosts)
        if hosts and address is not None:
            raise ConfigError("hosts= starts a new cluster, but address= joins one: use only one")
        if hosts and listen is None:
            listen = "0.0.0.0:0"  # each host gets the address by which it reaches this host
        count = None if workers is None else whole(workers)
        if workers is not None and (count is None or not 0 <= count <= WORKERS_MAX):
            raise ValueError(
                f"workers={workers!r}: it must be a number from 0 to {WORKERS_MAX}, or None"
            )
        config = _config(config, memory, spill_dir, resources)
        from hoplite_mp._client.open_cluster import enter  # imported here: workers do not need it

        self._pid = os.getpid()
        self._debugs = bool(debug)
        self._host: HostProcesses | None
        self._host, network = enter(
            count,
            config,
            listen=listen,
            address=address,
            ports=ports,
            token=token,
            tls=tls,
            attaches=self._attaches and not resources,
            joins=self._joins,
            stays=self._stays,
            standby=self._standby,
        )
        # Imported here and not when it is first needed: a child that another thread forks during
        # the import could never import the module. The host's processes start meanwhile.
        import cloudpickle  # noqa: F401

        self._network = network
        self._join(self._host.runtime)
        if network is None or self._host.workers:  # otherwise, other nodes may still have workers
            self._runtime.pool_sizes[0] = self._host.workers
        self._shutting = locks.lock("cluster.end")
        self._far: RemoteHosts | None = None
        if hosts:
            self._start_remote(hosts, config)
        self._keep()

    def _start_remote(self, hosts: Sequence[str], config: Config) -> None:
        """Starts nodes on other hosts, and waits until all have joined."""
        from hoplite_mp._client.network import RemoteHosts

        network = self._network
        assert network is not None
        before = len(self.nodes)
        try:
            self._far = RemoteHosts(
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
        runtime.hidden = self._hidden

    @property
    def address(self) -> str | None:
        """The IP address and port at which other hosts can join; None in a cluster of one host.

        Examples
        --------
        >>> c.address is None
        True
        """
        return None if self._network is None else self._network.address

    @property
    def token_file(self) -> Path | None:
        """The file with the token for joining; None if the token was not read from a file.

        Examples
        --------
        >>> c.token_file is None
        True
        """
        return None if self._network is None else self._network.token.file

    @classmethod
    def _of(cls, runtime: Runtime) -> Cluster:
        """The Cluster for a runtime that was not created by a Cluster, for example in a worker."""
        if runtime.face is None:
            face = cls.__new__(cls)
            face._host = face._network = face._far = None
            face._shutting = locks.lock("cluster.end")
            face._join(runtime)
            if runtime.is_actor and runtime.demands.common_workers():
                face._pool = COMMON_POOL  # tasks that an actor submits do not run in the actor
            runtime.face = lambda: face  # a worker's Cluster exists as long as the worker
        found = runtime.face()
        if found is None:
            raise ClosedError(
                "this cluster is shutting down, because the program has no reference to it any more"
            )
        return found  # type: ignore[no-any-return]

    def _bound(self, numbers: tuple[int, ...]) -> int:
        """The pool of one of these nodes, in rotation."""
        return self._runtime.bound_pool(numbers[next(_turns) % len(numbers)])

    def __reduce__(self) -> tuple[Any, ...]:  # unpickled as current(), with these options
        return _arrived, (self._options,)

    # -- tasks ---------------------------------------------------------------------------------

    def options(self, **changes: Any) -> Cluster:
        """A view of this cluster with other defaults for its tasks and actors.

        The options apply to `submit`, `map`, `stream`, `executor`, `spmd` and `actor`. The view is
        the same cluster: it shares workers and objects. Later options override earlier ones.

        Parameters
        ----------
        node : Node, str, or a list of them, optional
            Tasks and actors run only on these nodes. Default: any node.
        retries : int, optional
            Maximum number of retries after the death of a task's worker or host, 0 to 127; also
            after exceptions listed in `retry_exceptions`. Default: `Config.retries`, 3; 0 for
            actors.
        retry_exceptions : class or tuple of classes, optional
            Subclasses of Exception after which a task is retried, as after a death. The exception
            of the last attempt is raised unchanged. `map` retries only the failed item. Default:
            none.
        retry_delay : float or tuple, optional
            Seconds between two attempts, for `submit`, `map` and executors. Or ``(first, factor,
            max)``: `first` and `max` are seconds, and each pause is `factor` times the previous
            pause, at most `max`. During a pause the task occupies no worker and no resources.
            Default: 0.
        timeout : float, optional
            The maximum duration of a task in seconds. After this time its worker is killed and
            replaced, and the task fails with HopliteTimeoutError. Default: no limit.
        copy : bool, optional
            True: results, and the values of refs among the arguments, are writable copies. Default:
            False.
        name : str, optional
            The name that errors and traces show; for an actor, the name by which `get_actor` finds
            it.
        concurrency : int, optional
            Maximum number of `async def` tasks that one worker runs at a time, or of calls that an
            actor runs at a time. Default: 1.
        buffersize : int, optional
            The number of items by which a stream may be ahead of its reader. Default: as many items
            as fit into `Config.stream_bytes_max` bytes.
        priority : int, optional
            Ready tasks with a higher priority begin first, even before tasks from other programs.
            A nested task has at least the priority of its parent. Default: 0.
        resources : dict, optional
            A task with ``{"gpu": 1}`` runs on a node where this amount is free, and holds the
            amount while it runs; `assigned` lists the units. Each worker of `executor` and `spmd`,
            and an actor's process, holds its units until it exits; CUDA_VISIBLE_DEVICES lists its
            "gpu" units. Default: none.
        env : dict, optional
            For `executor`, `actor` and `spmd`: environment variables for their processes, set
            before any import. A value of None removes the variable. Such a process starts in about
            0.2 s instead of 1 ms. Other calls raise ValueError.
        restarts, checkpoint, detached, get_if_exists
            For actors only; see `actor`.

        Returns
        -------
        Cluster
            The view.

        Raises
        ------
        TypeError
            An option does not exist.
        ValueError
            A value is not allowed, a node has never been in the cluster, or no node has the
            `resources` at the time of the call.
        NodeLostError
            `node`: the node has left or was lost. `resources`, from the Future: the nodes with the
            resources are gone, and no such node has joined within `Config.resource_wait_s`.

        Examples
        --------
        >>> careful = c.options(retries=0, timeout=60)
        >>> careful.submit(sum, [1, 2, 3]).result()
        6
        """
        return self._view(self._options.override(self._resolved(changes)))

    def _view(self, options: Options) -> Cluster:
        view = _View.__new__(_View)
        view.__dict__.update(self.__dict__)
        view._options = options
        view._base = self._base if isinstance(self, _View) else self
        return view


class ApartCluster(Cluster):
    """A Cluster that always starts a new node. Needed to measure the network from this host."""

    _attaches = False


class HiddenCluster(Cluster):
    """A Cluster that belongs to another object, such as `Executor`. Users have no access to it."""

    _hidden = True


class _View(Cluster):
    """The result of `options`, a view of a cluster. Its `shutdown` shuts the cluster down."""

    _base: Cluster

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._base.shutdown(wait, cancel_futures=cancel_futures)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self._closed = self._base._closed
        return super().submit(fn, *args, **kwargs)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        return self._base.__exit__(kind, value, traceback)


def _config(
    config: Config | None,
    memory: int | str | None,
    spill_dir: str | Path | None,
    resources: Mapping[str, float] | None,
) -> Config:
    """The Config of a new cluster: `config`, or the one from the environment, with these
    changes."""
    config = Config.from_environment() if config is None else config
    if not isinstance(config, Config):
        raise TypeError(f"config={config!r}: it must be a hoplite_mp.Config, or None")
    changes: dict[str, Any] = {}
    if memory is not None:
        changes["memory_bytes"] = parse_size(memory)
    if spill_dir is not None:
        changes["spill_dir"] = str(spill_dir)
    if resources is not None:
        changes["resources"] = amounts_text(amounts_of(resources)) or None
    elif config.resources is not None:
        parse_amounts(config.resources)
    return dataclasses.replace(config, **changes)


def _arrived(options: Options) -> Cluster:
    """Unpickles a Cluster as this process's own cluster, or as a view of it. Pickles contain the
    name of this function."""
    cluster = current()
    return cluster if options == cluster._options else cluster._view(options)


def current() -> Cluster:
    """The caller's cluster.

    Returns
    -------
    Cluster
        Inside a task, the cluster that runs the task. Otherwise, the most recently opened cluster
        that is still open, excluding the clusters inside `hoplite_mp.Executor` and the joblib
        backend.

    Raises
    ------
    ClosedError
        No cluster is open.

    Examples
    --------
    >>> def count():
    ...     return len(hoplite_mp.current().nodes)
    >>> c.submit(count).result()
    1
    """
    return Cluster._of(current_runtime())


current.__module__ = "hoplite_mp"  # as users import it
