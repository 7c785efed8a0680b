"""hoplite_mp: worker processes that share immutable objects, with fault-tolerant collectives.

The names below are the public face; everything else may change.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from hoplite_mp import errors as _errors
from hoplite_mp._version import __version__ as __version__
from hoplite_mp.actor import Actor as Actor
from hoplite_mp.client.completions import as_completed as as_completed
from hoplite_mp.client.futures import Future as Future
from hoplite_mp.cluster import Cluster as Cluster
from hoplite_mp.cluster import Node as Node
from hoplite_mp.cluster import current as current
from hoplite_mp.config import Config as Config
from hoplite_mp.connecting import connect as connect
from hoplite_mp.drop_in import Executor as Executor
from hoplite_mp.errors import AuthError as AuthError
from hoplite_mp.errors import ClosedError as ClosedError
from hoplite_mp.errors import ConfigError as ConfigError
from hoplite_mp.errors import HopliteError as HopliteError
from hoplite_mp.errors import HopliteTimeoutError as HopliteTimeoutError
from hoplite_mp.errors import ManagerLostError as ManagerLostError
from hoplite_mp.errors import ObjectLostError as ObjectLostError
from hoplite_mp.errors import PeerLostError as PeerLostError
from hoplite_mp.errors import ProtocolError as ProtocolError
from hoplite_mp.errors import ReduceError as ReduceError
from hoplite_mp.errors import StoreFullError as StoreFullError
from hoplite_mp.errors import TaskError as TaskError
from hoplite_mp.group import Group as Group
from hoplite_mp.ref import ObjectRef as ObjectRef
from hoplite_mp.ref import by_ref as by_ref
from hoplite_mp.serial import register_pickle_by_value as register_pickle_by_value

if _TYPE_CHECKING:
    from hoplite_mp.errors import ActorLostError as ActorLostError
    from hoplite_mp.errors import NodeLostError as NodeLostError
    from hoplite_mp.errors import WorkerLostError as WorkerLostError
    from hoplite_mp.sync.locks import Event as Event
    from hoplite_mp.sync.locks import Lock as Lock
    from hoplite_mp.sync.locks import Semaphore as Semaphore
    from hoplite_mp.sync.queues import Queue as Queue
else:
    # Imported at their first use, because few programs have them: name -> module.
    _LATER = {
        "Event": "hoplite_mp.sync.locks",
        "Lock": "hoplite_mp.sync.locks",
        "Queue": "hoplite_mp.sync.queues",
        "Semaphore": "hoplite_mp.sync.locks",
    }

    def __getattr__(name: str) -> object:
        if name in _errors.LOST:  # made at their first use
            return getattr(_errors, name)
        if name in _LATER:
            from importlib import import_module

            found = getattr(import_module(_LATER[name]), name)
            return globals().setdefault(name, found)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Actor",
    "ActorLostError",
    "AuthError",
    "ClosedError",
    "Cluster",
    "Config",
    "ConfigError",
    "Event",
    "Executor",
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
    "ReduceError",
    "Semaphore",
    "StoreFullError",
    "TaskError",
    "WorkerLostError",
    "as_completed",
    "by_ref",
    "connect",
    "current",
    "register_pickle_by_value",
]

for _name in (
    "Actor",
    "Cluster",
    "Executor",
    "Future",
    "Group",
    "Node",
    "ObjectRef",
    "as_completed",
):
    globals()[_name].__module__ = "hoplite_mp"
for _name in ("Actor", "by_ref", "connect", "current", "register_pickle_by_value", "Config"):
    globals()[_name].__module__ = "hoplite_mp"


def __dir__() -> list[str]:
    """What completion offers: the public face. Submodules can be imported all the same."""
    return sorted(
        [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
    )
