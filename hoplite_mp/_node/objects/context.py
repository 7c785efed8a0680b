"""The context of a node's components: ports, shared memory, object table.

Components are built one after another, each from this context and the components below it. A
constructor copies the attributes that it needs, and keeps no reference to the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp import _shm, _tasks
    from hoplite_mp._node.objects.exports import Exports
    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.questions import Questions
    from hoplite_mp._node.roster import Roster
    from hoplite_mp._node.store.budget import Store
    from hoplite_mp._node.trace_events import TraceEvents
    from hoplite_mp._protocol.local import Reply
    from hoplite_mp._protocol.peers import PeerMessage
    from hoplite_mp.config import Config

__all__ = ["HostContext"]


@dataclass(frozen=True, slots=True)
class HostContext:
    """The context of one host. `client` is the client with the node's own slot. `client.number` is
    the node's number in its cluster, or 0 until the manager has admitted the node."""

    config: Config
    loop: LoopPort
    trace_events: TraceEvents
    client: _shm.NodeClient
    tasks: _tasks.Tasks
    store: Store
    results: ResultWriter
    remote_objects: RemoteObjects
    imports: Imports
    exports: Exports
    roster: Roster
    questions: Questions
    # Sends a message to the manager.
    send_manager: Callable[[Any], None]
    # Sends a message to the node of the host with this id. Returns False if there is none.
    send_peer: Callable[[int, PeerMessage], bool]
    # Connections to the processes on this host, by slot.
    clients: Mapping[int, Any]
    # Replies to the process in the slot.
    reply: Callable[[int, Reply], None]
    # Returns a function that later sends a reply to the slot's present process, or drops the reply
    # if that process has ended.
    replier: Callable[[int], Callable[[Reply], None]]
