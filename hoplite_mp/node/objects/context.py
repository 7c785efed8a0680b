"""What stands below the rooms of one host's node: its ports, its memory, its table of objects.

Why it exists: rooms are built one after the other, each from this and from the rooms below it. A
room takes from here, in its constructor, what it needs, and keeps no reference to the whole.
It must never know: any room that is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp import _shm, _tasks
    from hoplite_mp.config import Config
    from hoplite_mp.node.notes import Notes
    from hoplite_mp.node.objects.exports import Exports
    from hoplite_mp.node.objects.imports import Imports
    from hoplite_mp.node.objects.remote_objects import RemoteObjects
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.objects.store import Store
    from hoplite_mp.node.ports import Loop
    from hoplite_mp.node.questions import Questions
    from hoplite_mp.node.roster import Roster
    from hoplite_mp.protocol.local import Reply
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["HostContext"]


@dataclass(frozen=True, slots=True)
class HostContext:
    """Of one host. `client` is the node's own slot; `client.number` is the node's number in its
    cluster, 0 until the manager has let it in."""

    config: Config
    loop: Loop
    notes: Notes
    client: _shm.NodeClient
    tasks: _tasks.Tasks
    store: Store
    results: Results
    remote_objects: RemoteObjects
    imports: Imports
    exports: Exports
    roster: Roster
    questions: Questions
    # A message to the manager.
    send_manager: Callable[[Any], None]
    # A message to the node of the host with that id; False: there is none.
    send_peer: Callable[[int, PeerMessage], bool]
    # Slots of processes that can be told something.
    clients: Mapping[int, Any]
    # An answer to the process in that slot.
    reply: Callable[[int, Reply], None]
    # The same for an answer that takes a while: it goes to the process that is there now, or to
    # nobody.
    replier: Callable[[int], Callable[[Reply], None]]
