"""What an aimed run is made of: hosts, programs, and one fault at the right moment.

Random faults strike at random moments, and some promises are about a moment that lasts
microseconds. An aimed run plays one short program on real nodes in virtual time, and the fault that
its promise is about. In the programs capital letters are hosts, `c` is the cluster as a program
sees it, `a` the run.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

from hoplite_mp._simulation.faults.message_faults import MessageFault
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import Leaf
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from random import Random

    from hoplite_mp._protocol.fields import Message
    from hoplite_mp._simulation.workloads.workload import Workload

__all__ = ["BIG", "Aim", "with_resource"]

BIG = 100_000  # items of an object that takes a while


class Aim:
    """One aimed run: what its program and its fault are made with."""

    def __init__(self, work: Workload, rng: Random) -> None:
        self.work, self.rng, self.world = work, rng, work.world
        self.hosts = work.hosts()
        self.late = self.world.timeline.after
        self.pending_faults: dict[str, None] = {}  # messages whose message faults have not struck
        self.struck: Counter[str] = Counter()  # faults that have happened, by kind
        self._must: Counter[str] = Counter()
        self.changes = contextlib.ExitStack()  # of limits, until the run is over

    def some(self, count: int) -> list[Any]:
        """So many hosts, of which none has the manager."""
        return self.rng.sample([host for host in self.hosts if host.place], count)

    def run(self, host: Any, name: str, body: Any, strict: bool = True) -> None:
        """Runs a program on that host. strict: any error in it fails the run."""
        self.work.program(host, name, body, lambda: strict)

    def leaf(self, items: int = BIG) -> Leaf:
        """What an object of so many items contains."""
        return Leaf(self.work.salt(), 0, items)

    def offer(
        self,
        host: Any,
        leaf: Leaf,
        name: str,
        *,
        until: str = "over",
        to: Any = None,
        strict: bool = True,
    ) -> None:
        """Runs a program that puts an object, copies it to the host `to`, publishes it, and lets go
        when it hears `until`."""

        def put(c: Any) -> None:
            ref = c.put(leaf.array())
            if to is not None:
                c.broadcast(ref, to=[f"h{to.number}"]).result(timeout=HANGS_S)
                time.sleep(0.1)
            self.work.board.publish(name, ref._id)
            self.hear(until)

        self.run(host, f"put {name}", put, strict)

    def read(self, c: Any, leaf: Leaf, name: str) -> Any:
        """Reads a published object, and checks it."""
        ref = self.work.ref(c, name)
        value = self.work.value(c, ref, name)
        self.work.oracle.check_leaf(leaf, value)
        return value

    def message_fault(
        self, kind: type[Message], strike: Any, arrives: bool = True, *, must: bool = True
    ) -> None:
        """Calls strike(sender, receiver) when a message of this kind has arrived (arrives=False: is
        about to leave), and at the next one if that returns True. must: a run in which it does not
        strike fails."""
        message = str(kind.__struct_config__.tag)

        def on_message(sender: int, receiver: int) -> None:
            if not strike(sender, receiver):
                self.pending_faults.pop(message, None)
            else:
                self._set(message, on_message, arrives)

        if must:
            self.pending_faults[message] = None
        self._set(message, on_message, arrives)

    def _set(self, message: str, on_message: Any, arrives: bool) -> None:
        self.world.environment.descriptors.message_faults.append(
            MessageFault(message, 1, arrives, on_message)
        )

    def say(self, name: str) -> None:
        """Tells the other programs that something has happened."""
        self.work.board.publish(name, None)

    def hear(self, name: str) -> None:
        """Waits until a program has said that."""
        self.work.board.find(name, HANGS_S)

    def limit(self, module: Any, name: str, value: int) -> None:
        """Sets a constant of a module for this run."""
        self.changes.enter_context(mock.patch.object(module, name, value))

    # -- faults --------------------------------------------------------------------------------

    def must(self, **kinds: int) -> None:
        """So many faults of these kinds have to happen, or the run fails."""
        self._must.update(kinds)

    @property
    def missed(self) -> list[str]:
        """What was to strike and has not."""
        message_faults = [f"a fault at {name}" for name in self.pending_faults]
        return [*message_faults, *sorted((self._must - self.struck).elements())]

    def die(self, host: Any) -> None:
        """Ends a host, as a power cut does."""
        self.struck["die"] += host.alive
        self.world.end(host, "it dies")

    def cut(self, one: Any, other: Any, seconds: float) -> None:
        """For so long nothing passes between two hosts."""
        self.struck["cut"] += one.alive and other.alive
        self.world.cut({one.place}, {other.place})
        self.late(seconds, self.heal, one, other)

    def heal(self, one: Any, other: Any) -> None:
        """Ends a cut."""
        self.world.heal({one.place}, {other.place})

    def stop(self, host: Any, seconds: float) -> None:
        """A host does nothing for so long."""
        self.struck["stop"] += host.alive
        self.world.stop(host.place)
        self.late(seconds, self.resume, host)

    def resume(self, host: Any) -> None:
        """A stopped host continues."""
        self.world.resume(host.place)

    def leave(self, host: Any) -> None:
        """Asks a host to leave in order."""
        self.world.leave(host.place)
        self.struck["leave"] += host in self.world.leaving

    def kill(self, host: Any, process: Any) -> None:
        """Kills a process."""
        self.struck["kill"] += process.alive
        self.world.kill(host, process)

    def reset(self, one: Any, other: Any) -> None:
        """Resets all connections between two hosts."""
        self.struck["reset"] += bool(self.world.board.between(one.place, other.place))
        self.world.reset(one.place, other.place)

    def half_open(self, host: Any, seconds: float) -> None:
        """The host's connection to the manager is reset; the manager hears of it so much later."""
        manager = self.world.manager
        for stream in self.world.board.between(0, host.place):
            for end in (stream, stream.peer):
                if manager is not None and end.peer.loop is manager.loop:
                    self.struck["half_open"] += 1
                    end.reset()
                    self.late(seconds, end.peer.reset)

    def kill_manager(self) -> None:
        """The manager's process dies, and another one is started."""
        before = self.world.managers
        self.world.kill_manager(0.02)
        self.struck["manager"] += self.world.managers - before

    def again(self, host: Any) -> None:
        """Dies, and comes again."""
        self.die(host)
        self.late(0.05, self.world.rejoin, host.place)

    def all_again(self) -> None:
        """All hosts with the resource die, and come again."""
        gone = with_resource(self)
        self.must(die=len(gone))
        for host in gone:
            self.again(host)
        time.sleep(0.1)
        hosts = self.world.hosts
        if not self.wait_for(5.0, lambda: all(hosts[h.place].number >= 0 for h in gone)):
            raise WrongEnd("hosts that have died do not come again")
        time.sleep(0.2)

    def wait_for(self, seconds: float, what: Any) -> bool:
        """Whether that becomes true within so many seconds."""
        until = self.world.timeline.now + seconds
        while self.world.timeline.now < until:
            if what():
                return True
            time.sleep(0.005)
        return False

    def crawl(self, host: Any, up: float = 250e3, down: float | None = None) -> None:
        """From now on the host sends, and receives, so many bytes a second."""
        self.struck["crawl"] += host.alive
        port = self.world.network.ports[host.place]
        port.up, port.down = up, port.down if down is None else down


def with_resource(a: Aim) -> list[Any]:
    """The hosts that have the resource of remote.py."""
    return [h for h in a.hosts if h.config.resources]
