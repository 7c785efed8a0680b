"""What the rooms of an imitated node know of it, and of the world that it is in.

Why it exists: rooms are made by their node (host.py), and reach its other rooms through it. They
name it by these interfaces, so that no file needs another one that needs it.
It must never know: how the rooms do what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.protocol.messages import NodeToManager
    from hoplite_mp.simulation.network import Channel
    from hoplite_mp.simulation.streams import Cell, Engine, Key, Wanting
    from hoplite_mp.simulation.timeline import Timeline

__all__ = ["ImitatedNode", "ImitatedWorld"]


class ImitatedWorld(Protocol):
    """See simulation/world.py."""

    tracked: bool
    block_bytes: int
    least: int
    timeline: Timeline
    truth: Any
    waits: Any
    keeping: Any
    manager: Any
    network: Any
    hosts: Any

    def wire(self, one: Any, other: Any) -> Channel: ...


class ImitatedNode(Protocol):
    """See simulation/host.py."""

    world: ImitatedWorld
    host: int
    home: int
    incarnation: int
    number: int
    members: Any
    engine: Engine
    places: Any
    copies: Any
    parts: Any
    asks: Any
    down: Channel

    @property
    def now(self) -> float: ...
    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None: ...
    def send_manager(self, message: NodeToManager) -> None: ...
    def pull(self, cell: Cell, parent: int, key: Key, wanting: Wanting) -> None: ...
    def tell(self, peer: Any, what: str, *arguments: Any) -> None: ...
    def tell_home(self, object_id: bytes, what: str, *arguments: Any) -> bool: ...
