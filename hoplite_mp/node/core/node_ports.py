"""All ports of one node together.

Why it exists: who makes a node, for a host or for a simulation, makes these first.
It must never know: what is behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.ports import (
        Connections,
        Disk,
        DriverDoor,
        Engine,
        Lines,
        Loop,
        Processes,
        Stacks,
    )
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.transport.stream import Stream

__all__ = ["NodePorts"]


@dataclass(frozen=True)
class NodePorts:
    """What a node reaches out by; see node/ports.py. `manager`: the connection to a manager of this
    host; None: it is on another one. The last three are needed on a
    LAN alone."""

    loop: Loop
    lines: Lines
    processes: Processes
    stacks: Callable[[Workers], Stacks]
    disk: Disk
    hostname: str
    manager: Stream | None = None
    connections: Connections | None = None
    engine: Engine | None = None
    driver_door: DriverDoor | None = None
