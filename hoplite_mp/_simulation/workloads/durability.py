"""Values that survive the loss of hosts: reconstructed results, second copies, nested refs.

A lost result is recomputed by the node that submitted the task, if its host is alive. An object
with a second copy survives the loss of one host. A ref inside an object keeps the object to which
it refers alive. So programs that read these values get no errors even if hosts die.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._simulation.oracle.values import Leaf, add, make, make_refs
from hoplite_mp._simulation.workloads.programs import DEATHS_MAX, HANGS_S

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.oracle.oracle import Oracle
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_copies", "begin_fetched", "begin_nested", "begin_reconstructed"]

WIDTH_MAX = 5


def begin_reconstructed(work: Programs) -> None:
    """Starts a program whose tasks compute values and their sums. It reads all of them later."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    salt, width = work.salt(), rng.randint(1, WIDTH_MAX)
    items = max(1, work.items(3 * width))
    leaves = [Leaf(salt, index, items) for index in range(width)]
    seconds = [rng.choice([0.0, 0.0, 0.02]) * rng.random() for _ in leaves]
    late = rng.choice([0.0, 1.0, 1.5]) * rng.random() * work.span_s
    sums = rng.random() < 0.7
    keeps = rng.random() < 0.6  # whether it keeps refs to the summands
    name = f"remade {salt}"
    readers = rng.choice([0, 0, 1, 2])
    users = [readers]
    body = partial(_reconstructed, work, leaves, seconds, late, sums, keeps, name, readers)
    work.program(rng.choice(hosts), name, body, holds=lambda: _survives(work.oracle))
    for _ in range(readers):
        after = rng.random() * work.span_s
        read = partial(_read_sum, work, leaves, name, after, users)
        work.program(rng.choice(hosts), f"reader of {name}", read)


def _survives(oracle: Oracle) -> bool:
    world = oracle.world
    disturbed = world.cuts or world.resets or world.stops or world.managers or oracle.small_stores
    return not disturbed and len(world.lost) + world.killed <= DEATHS_MAX


def _reconstructed(
    work: Programs,
    leaves: list[Leaf],
    seconds: list[float],
    late: float,
    sums: bool,
    keeps: bool,
    name: str,
    readers: int,
    c: Cluster,
) -> None:
    import time

    refs: list[Any] = [c.submit(make, *pair).ref for pair in zip(leaves, seconds, strict=True)]
    total = refs[0]
    for ref in refs[1:] if sums else ():
        total = c.submit(add, total, ref).ref
    if readers:
        work.board.publish(name, total._id)
    if not keeps:
        del refs[1:]
    time.sleep(late)
    for leaf, ref in zip(leaves, refs, strict=False):
        work.oracle.check_leaf(leaf, work.value(c, ref, name))
    _check_sum(work, leaves if sums else leaves[:1], work.value(c, total, name))
    if readers:
        work.board.find(f"{name} is not needed")


def _check_sum(work: Programs, leaves: list[Leaf], value: Any) -> None:
    whole = sum((leaf.array() for leaf in leaves[1:]), start=leaves[0].array())
    work.oracle.check_value(value, whole, f"a sum of {len(leaves)} with salt {leaves[0].salt}")


def _read_sum(
    work: Programs, leaves: list[Leaf], name: str, late: float, users: list[int], c: Cluster
) -> None:
    import time

    try:
        ref = work.ref(c, name)
        time.sleep(late)
        if ref is not None:
            value = work.value(c, ref, f"reader of {name}")
            if len(leaves) > 1 and not (value == leaves[0].array()).all():
                _check_sum(work, leaves, value)
            else:
                work.oracle.check_leaf(leaves[0], value)
    finally:
        users[0] -= 1
        if not users[0]:
            work.board.publish(f"{name} is not needed", None)


def begin_copies(work: Programs) -> None:
    """Starts a program that puts a value with a second copy, and others that hold and later read
    it."""
    hosts, rng = work.hosts(), work.rng
    if len(hosts) < 2:
        return
    leaf = Leaf(work.salt(), 0, max(1, work.items(4)))
    name = f"copied {leaf.salt}"
    maker = rng.choice(hosts)
    others = [host for host in hosts if host is not maker]
    readers = rng.sample(others, min(len(others), rng.randint(1, 2)))
    holds_s = rng.random() * work.span_s

    def put(c: Cluster) -> None:
        import time

        ref = c.put(leaf.array(), copies=2)
        work.board.publish(name, ref._id)
        time.sleep(holds_s)
        released.append(True)

    released: list[bool] = []
    work.program(maker, name, put)
    for host in readers:
        late = rng.random() * work.span_s * 1.5
        _read_copy(work, host, leaf, name, late, released)


def _read_copy(
    work: Programs, host: Any, leaf: Leaf, name: str, late: float, released: list[bool]
) -> None:
    """released: not empty once the program that has put the object has released it."""
    held: list[bool] = []  # whether a ref was held before any host died; empty: never held

    def read(c: Cluster) -> None:
        import time

        ref = work.ref(c, name)
        if ref is None or ref._hold is None or released:
            return  # perhaps the object had no holder when this host's request arrived
        held.append(not work.world.lost)
        time.sleep(late)
        work.oracle.check_leaf(leaf, work.value(c, ref, f"reader of {name}"))

    def holds() -> bool:
        world = work.world
        disturbed = (
            world.cuts or world.resets or world.stops or world.managers or work.oracle.small_stores
        )
        return bool(held and held[0]) and not disturbed and len(world.lost) <= 1

    work.program(host, f"reader of {name}", read, holds=holds)


def begin_fetched(work: Programs) -> None:
    """Starts a program that puts a value, and readers. Some readers fetch and keep the value, some
    hold a ref and read the value later, and some get the ref later, when the owner may be lost. All
    of them can read the value as long as a host that has fetched it is alive. Readers that held a
    ref before the owner left can always read it."""
    hosts, rng = work.hosts(), work.rng
    if len(hosts) < 3:
        return
    leaf = Leaf(work.salt(), 0, max(1, work.items(4)))
    maker, *others = rng.sample(hosts, min(len(hosts), rng.randint(3, 5)))
    fetched = _Fetched(work, leaf, f"fetched {leaf.salt}", maker, len(others), len(others))
    work.program(maker, fetched.name, partial(fetched.put, rng.random() * work.span_s))
    if rng.random() < 0.2:
        work.world.timeline.after(rng.random() * work.span_s, work.world.leave, maker.place)
    keepers = rng.randint(1, len(others) - 1)
    for number, host in enumerate(others):
        late = rng.random() * work.span_s * 1.5
        holds = partial(fetched.must_succeed, host)
        kind = "keeps" if number < keepers else rng.choice(["holds", "meets"])
        body = partial(fetched.read, host, late, kind)
        work.program(host, f"reader of {fetched.name}", body, holds)


@dataclass
class _Fetched:
    """A value that other hosts fetch. holders_left: readers that do not hold it yet; readers_left:
    readers that may still read it."""

    work: Programs
    leaf: Leaf
    name: str
    maker: VirtualHost
    holders_left: int
    readers_left: int
    # Hosts of readers that held a ref before any fault at the owner's machine.
    held: set[VirtualHost] = field(default_factory=set)
    kept: set[VirtualHost] = field(default_factory=set)  # hosts that have fetched it
    # Hosts that got the ref after others had fetched the value.
    met: set[VirtualHost] = field(default_factory=set)

    def put(self, holds_s: float, c: Cluster) -> None:
        import time

        ref = c.put(self.leaf.array())
        self.work.board.publish(self.name, ref._id)
        self.work.board.find(f"{self.name} is held by all")
        time.sleep(holds_s)

    def read(self, host: VirtualHost, late: float, kind: str, c: Cluster) -> None:
        import time

        value: Any = None
        try:
            ref = None if kind == "meets" else self.work.ref(c, self.name)
            if ref is not None and self.maker.place not in self.work.world.struck:
                self.held.add(host)
            if ref is not None and kind == "keeps":
                value = self._value(c, ref)
                self.kept.add(host)
            self.holders_left -= 1
            if not self.holders_left:
                self.work.board.publish(f"{self.name} is held by all", None)
            time.sleep(late)
            if kind == "meets":
                if self.kept:
                    self.met.add(host)
                ref = self.work.ref(c, self.name)
            if ref is not None:
                self._value(c, ref)
        finally:
            self.readers_left -= 1
            if not self.readers_left:
                self.work.board.publish(f"{self.name} is not needed", None)
        if value is not None:  # the array pins the copy on this host
            self.work.board.find(f"{self.name} is not needed", HANGS_S)

    def _value(self, c: Cluster, ref: Any) -> Any:
        value = self.work.value(c, ref, f"reader of {self.name}")
        self.work.oracle.check_leaf(self.leaf, value)
        return value

    def must_succeed(self, host: VirtualHost) -> bool:
        """Whether a reader on the host must succeed, after the faults so far."""
        no_errors_on, maker = self.work.no_errors_on, self.maker
        if host in self.held and maker in self.work.world.departed and no_errors_on(host)():
            return True
        return host in self.held | self.met and any(no_errors_on(host, one)() for one in self.kept)


def begin_nested(work: Programs) -> None:
    """Starts a program that puts an object with refs, and a reader. The reader can read the objects
    to which these refs refer, even if no process holds other refs to them."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    salt, width = work.salt(), rng.randint(1, 3)
    items = max(1, work.items(2 * width))
    leaves = [Leaf(salt, index, items) for index in range(width)]
    name = f"nested {salt}"
    by_task = rng.choice(["", "each", "all"])
    late = rng.random() * work.span_s

    def put(c: Cluster) -> None:
        if by_task == "all":  # refs in the result of a task
            made = c.submit(make_refs, leaves).ref
            work.board.publish(name, made._id)
            work.board.find(f"{name} is not needed")
            return
        if by_task:
            inner: list[Any] = [c.submit(make, leaf, 0.0).ref for leaf in leaves]
        else:
            inner = [c.put(leaf.array()) for leaf in leaves]
        outer = c.put({"refs": inner})
        c.wait(inner)  # tasks would be cancelled when their program ends
        del inner
        work.board.publish(name, outer._id)
        work.board.find(f"{name} is not needed")

    def read(c: Cluster) -> None:
        import time

        try:
            ref = work.ref(c, name)
            if ref is None:
                return
            found = work.value(c, ref, f"reader of {name}")
            found = found["refs"] if isinstance(found, dict) else found
            work.board.publish(f"{name} is not needed", None)
            del ref
            time.sleep(late)
            for leaf, inner in zip(leaves, found, strict=True):
                work.oracle.check_leaf(leaf, work.value(c, inner, f"reader of {name}"))
        finally:
            work.board.publish(f"{name} is not needed", None)

    maker, reader = rng.choice(hosts), rng.choice(hosts)
    holds = work.no_errors_on(maker, reader, tasks=bool(by_task))
    if by_task == "all":  # a task's objects are lost with its host, which may be any
        holds = bool
    work.program(maker, name, put, holds)
    work.program(reader, f"reader of {name}", read, holds)
