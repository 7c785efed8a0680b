"""The common parts of all hosts of a run: time, the network, listeners, sizes.

Hosts are built from these parts, and do not depend on the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hoplite_mp._simulation.virtual.connections import Switchboard
from hoplite_mp._simulation.virtual.loop import Descriptors
from hoplite_mp._simulation.virtual.processes import VirtualProcesses
from hoplite_mp._transport.addresses import Address
from hoplite_mp.config import Config

if TYPE_CHECKING:
    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.timeline import Timeline

__all__ = ["RunEnvironment", "Sizes", "address_of"]

PORT = 7000
MANAGER_PORT = 7001


def address_of(place: int) -> Address:
    """Returns the address at which the machine's node listens."""
    return Address(f"10.0.{place // 250}.{place % 250 + 1}", PORT)


@dataclass(frozen=True)
class Sizes:
    """Sizes on each host, in bytes."""

    block: int = 64 << 10  # the longest frame between engines
    store: int = 256 << 20
    disk: int = 1 << 30


def _config() -> Config:
    return Config(
        small_object_bytes_max=16 << 10,
        span_bytes=64 << 10,
        populate_ahead_bytes=0,
        spin_us_max=0,
        memory_reserve_bytes=1 << 20,
    )


@dataclass
class RunEnvironment:
    """The shared parts of one run. `place` is a machine's number in the network."""

    timeline: Timeline
    network: VirtualNetwork
    sizes: Sizes = field(default_factory=Sizes)
    config: Config = field(default_factory=_config)
    cluster: bytes = b"c" * 16
    manager_place: int = 0
    standby_place: int | None = None  # None: there is no standby
    workers: int = 2  # on each host
    resources: str | None = None  # of every third host
    collectors: bool = False  # whether processes have collector threads
    learning: bool = False  # whether programs use hoplite_mp.ml

    def __post_init__(self) -> None:
        self.descriptors = Descriptors()
        self.board = Switchboard(self.network, self.descriptors)
        self.processes = VirtualProcesses(self.timeline, self.network)

    def config_of(self, place: int) -> Config:
        """Returns the configuration of the machine's host."""
        if place % 3 != 1 or self.resources is None:
            return self.config
        return replace(self.config, resources=self.resources)

    @property
    def managers(self) -> set[int]:
        """The machines that may have a manager."""
        return {self.manager_place} | {one for one in (self.standby_place,) if one is not None}

    @property
    def manager_at(self) -> tuple[str, int]:
        """The manager's address."""
        return address_of(self.manager_place).host, MANAGER_PORT

    @property
    def standby_at(self) -> list[tuple[str, int]]:
        """The standby's address; empty if there is no standby."""
        if self.standby_place is None:
            return []
        return [(address_of(self.standby_place).host, MANAGER_PORT)]
