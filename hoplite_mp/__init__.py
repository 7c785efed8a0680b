"""hoplite_mp: worker processes that share immutable objects, with fault-tolerant collectives.

The names below are the public API, together with `errors`, `config`, `integrations` and `ml`. Each
name is imported when it is first used, as recommended by Scientific Python's SPEC 1, so neither the
command line nor a program that only imports the package has to wait until everything is loaded.

The packages whose names begin with an underscore may change at any time:

    _api         the public classes: clusters, executors, actors; collectives on refs
    _group       Groups: collective calls by several processes, and messages between them
    _sync        queues, locks, semaphores, events, conditions, barriers
    _cli         the command `hoplite-mp`
    _client      each process's access to the cluster: the store, tasks, its host's node
    _serialize   converts values to bytes, and reads them back without a copy
    _worker      the process that runs tasks
    _supervisor  the template process, from which all other processes on a host are forked
    _node        one process per host, which owns the store and exchanges objects with other hosts
    _manager     one process per cluster: the event loop around the planner
    _planner     decides, without any I/O, which host takes part in which operation, and how
    _protocol    the messages between these processes
    _transport   authenticated connections between hosts
    _simulation  the real planner and the real node on a virtual network, in virtual time
    _common      code that several of these packages share

Compiled from cext/: `_shm` (shared memory), `_tasks` (queues of tasks, boards of Groups), `_engine`
(streaming between hosts), `_reduce` (kernels), `_pages`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from hoplite_mp._version import __version__ as __version__

if _TYPE_CHECKING:
    from hoplite_mp._api.actor import Actor as Actor
    from hoplite_mp._api.aio import connect as connect
    from hoplite_mp._api.cluster import Cluster as Cluster
    from hoplite_mp._api.cluster import current as current
    from hoplite_mp._api.explain import Explanation as Explanation
    from hoplite_mp._api.explain import TransferPlan as TransferPlan
    from hoplite_mp._api.nodes import Node as Node
    from hoplite_mp._api.process_pool import Executor as Executor
    from hoplite_mp._client.completions import as_completed as as_completed
    from hoplite_mp._client.futures import Future as Future
    from hoplite_mp._common.ref import ObjectRef as ObjectRef
    from hoplite_mp._common.ref import by_ref as by_ref
    from hoplite_mp._group.group import Group as Group
    from hoplite_mp._serialize import register_pickle_by_value as register_pickle_by_value
    from hoplite_mp._sync.conditions import Barrier as Barrier
    from hoplite_mp._sync.conditions import Condition as Condition
    from hoplite_mp._sync.locks import BoundedSemaphore as BoundedSemaphore
    from hoplite_mp._sync.locks import Event as Event
    from hoplite_mp._sync.locks import Lock as Lock
    from hoplite_mp._sync.locks import RLock as RLock
    from hoplite_mp._sync.locks import Semaphore as Semaphore
    from hoplite_mp._sync.queues import Queue as Queue
    from hoplite_mp.config import Config as Config
    from hoplite_mp.errors import ActorLostError as ActorLostError
    from hoplite_mp.errors import AuthError as AuthError
    from hoplite_mp.errors import ClosedError as ClosedError
    from hoplite_mp.errors import ConfigError as ConfigError
    from hoplite_mp.errors import HopliteError as HopliteError
    from hoplite_mp.errors import HopliteTimeoutError as HopliteTimeoutError
    from hoplite_mp.errors import ManagerLostError as ManagerLostError
    from hoplite_mp.errors import NodeLostError as NodeLostError
    from hoplite_mp.errors import ObjectLostError as ObjectLostError
    from hoplite_mp.errors import PeerLostError as PeerLostError
    from hoplite_mp.errors import ProtocolError as ProtocolError
    from hoplite_mp.errors import ReduceError as ReduceError
    from hoplite_mp.errors import StateNotSavedError as StateNotSavedError
    from hoplite_mp.errors import StoreFullError as StoreFullError
    from hoplite_mp.errors import TaskError as TaskError
    from hoplite_mp.errors import WorkerLostError as WorkerLostError
else:
    _MODULES = {
        "Actor": "hoplite_mp._api.actor",
        "ActorLostError": "hoplite_mp.errors",
        "AuthError": "hoplite_mp.errors",
        "Barrier": "hoplite_mp._sync.conditions",
        "BoundedSemaphore": "hoplite_mp._sync.locks",
        "ClosedError": "hoplite_mp.errors",
        "Cluster": "hoplite_mp._api.cluster",
        "Condition": "hoplite_mp._sync.conditions",
        "Config": "hoplite_mp.config",
        "ConfigError": "hoplite_mp.errors",
        "Event": "hoplite_mp._sync.locks",
        "Executor": "hoplite_mp._api.process_pool",
        "Explanation": "hoplite_mp._api.explain",
        "Future": "hoplite_mp._client.futures",
        "Group": "hoplite_mp._group.group",
        "HopliteError": "hoplite_mp.errors",
        "HopliteTimeoutError": "hoplite_mp.errors",
        "Lock": "hoplite_mp._sync.locks",
        "ManagerLostError": "hoplite_mp.errors",
        "Node": "hoplite_mp._api.nodes",
        "NodeLostError": "hoplite_mp.errors",
        "ObjectLostError": "hoplite_mp.errors",
        "ObjectRef": "hoplite_mp._common.ref",
        "PeerLostError": "hoplite_mp.errors",
        "ProtocolError": "hoplite_mp.errors",
        "Queue": "hoplite_mp._sync.queues",
        "RLock": "hoplite_mp._sync.locks",
        "ReduceError": "hoplite_mp.errors",
        "Semaphore": "hoplite_mp._sync.locks",
        "StateNotSavedError": "hoplite_mp.errors",
        "StoreFullError": "hoplite_mp.errors",
        "TaskError": "hoplite_mp.errors",
        "TransferPlan": "hoplite_mp._api.explain",
        "WorkerLostError": "hoplite_mp.errors",
        "as_completed": "hoplite_mp._client.completions",
        "by_ref": "hoplite_mp._common.ref",
        "connect": "hoplite_mp._api.aio",
        "current": "hoplite_mp._api.cluster",
        "register_pickle_by_value": "hoplite_mp._serialize",
    }

    _COMPILED = "_engine", "_pages", "_reduce", "_shm", "_tasks"

    def __getattr__(name: str) -> object:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        try:
            return globals().setdefault(name, getattr(import_module(module), name))
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError):
                missing = str(error.name).removeprefix(f"{__name__}.") in _COMPILED
            else:
                absent = (f"cannot import name '{one}'" in str(error) for one in _COMPILED)
                missing = error.name == __name__ and any(absent)
            if missing:
                raise ImportError(
                    f"the compiled modules of {__name__} are missing in {__path__[0]}: run `make "
                    "build` there, or install the package (pip install hoplite_mp); if it is "
                    "installed, run Python in another directory: this one hides it"
                ) from error
            raise


__all__ = [
    "Actor",
    "ActorLostError",
    "AuthError",
    "Barrier",
    "BoundedSemaphore",
    "ClosedError",
    "Cluster",
    "Condition",
    "Config",
    "ConfigError",
    "Event",
    "Executor",
    "Explanation",
    "Future",
    "Group",
    "HopliteError",
    "HopliteTimeoutError",
    "Lock",
    "ManagerLostError",
    "Node",
    "NodeLostError",
    "ObjectLostError",
    "ObjectRef",
    "PeerLostError",
    "ProtocolError",
    "Queue",
    "RLock",
    "ReduceError",
    "Semaphore",
    "StateNotSavedError",
    "StoreFullError",
    "TaskError",
    "TransferPlan",
    "WorkerLostError",
    "as_completed",
    "by_ref",
    "connect",
    "current",
    "register_pickle_by_value",
]


def __dir__() -> list[str]:
    """The public API, for completion. Submodules can be imported even if they are not listed."""
    return sorted(
        [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
    )
