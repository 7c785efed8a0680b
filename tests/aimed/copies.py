"""Copies on their way while hosts die, leave, or cannot be reached."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from hoplite_mp._protocol.copies import Distribute, FetchFailed, FetchRefused
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import (
    Leaf,
    make_once_more,
)
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp.errors import HopliteTimeoutError, ObjectLostError, StoreFullError
from tests.aimed.aim import BIG, Aim

__all__ = [
    "abandoned", "circle", "drained", "forgiven", "gaps", "gathered", "no_room", "refused",
    "taken_back", "unknown", "unreachable", "untold",
]  # fmt: skip


def circle(a: Aim) -> None:
    """Two readers of one object may not wait for each other's copy."""
    a.must(cut=2)
    H, A, B = a.some(3)
    leaf = a.leaf(BIG)

    def first(c: Any) -> None:  # on A
        ref = a.work.ref(c, "ring")
        c.wait([ref])
        time.sleep(0.05)
        a.cut(A, H, 30.0)
        a.say("cut")
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "ring"))
        del ref
        c.wait([c.submit(make_once_more, Leaf(1, 0, 1), 0.0)])
        time.sleep(1.0)
        ref = a.work.ref(c, "ring")
        c.wait([ref])
        a.cut(A, B, 38.0)
        begun = time.monotonic()
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "ring"))
        if time.monotonic() - begun > 80.0:
            raise WrongEnd("it has waited for a cut")
        a.say("over")

    def second(c: Any) -> None:  # on B
        ref = a.work.ref(c, "ring")
        c.wait([ref])
        a.hear("cut")
        time.sleep(0.05)
        value = a.work.value(c, ref, "ring")
        a.work.oracle.check_leaf(leaf, value)
        a.work.board.find("over", HANGS_S)
        del value

    a.offer(H, leaf, "ring")
    a.run(A, "first", first)
    a.run(B, "second", second)


def unreachable(a: Aim) -> None:
    """A parent that cannot be reached is replaced within the time that peers have."""
    a.must(cut=1)
    H, K, A = a.some(3)
    leaf = a.leaf(20_000)
    dies = a.rng.random() < 0.5

    def read(c: Any) -> None:
        ref = a.work.ref(c, "far")
        c.wait([ref])
        time.sleep(0.05)
        a.cut(A, H, 38.0)
        if dies:
            # There is none if the manager has chosen the other parent.
            a.message_fault(FetchFailed, lambda s, r: a.kill_manager(), arrives=False, must=False)
        begun = time.monotonic()
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "far"))
        if time.monotonic() - begun > 36.0:
            raise WrongEnd("it has waited for the parent that cannot be reached")
        a.say("over")

    a.offer(H, leaf, "far", to=K)
    a.run(A, "read", read)


def unknown(a: Aim) -> None:
    """A host that joins reads from one that does not know it yet, because it is cut off from
    the manager."""
    a.must(cut=1)
    P, H = a.some(2)
    one, two = a.leaf(3000), a.leaf(BIG)

    def put(c: Any) -> None:
        ref = c.put(one.array())
        a.work.board.publish("one", ref._id)
        a.hear("read one")
        a.hear("read two")

    def put_there(c: Any) -> None:
        ref = c.put(two.array())
        c.broadcast(ref, to=[f"h{P.number}"]).result(timeout=HANGS_S)
        time.sleep(0.1)
        a.work.board.publish("two", ref._id)
        a.hear("one")
        time.sleep(0.05)
        port = a.world.network.ports[0]
        a.cut(a.hosts[0], P, 0.8)
        came(a.world.add_host(port.up, port.down))
        a.hear("read one")
        a.hear("read two")

    def came(host: Any) -> None:
        if host.number < 0:
            a.late(0.0005, came, host)
            return
        for name, leaf in (("one", one), ("two", two)):

            def read(c: Any, name: str = name, leaf: Any = leaf) -> None:
                a.read(c, leaf, name)
                a.say(f"read {name}")

            a.run(host, f"read {name}", read)

    a.run(P, "put", put)
    a.run(H, "put there", put_there)


def gaps(a: Aim) -> None:
    """A copy is made of what was received from two parents that have died."""
    a.must(die=2, crawl=4)
    H, K, D, E = a.some(4)
    leaf = a.leaf(BIG)

    def put(c: Any) -> None:
        ref = c.put(leaf.array())
        c.broadcast(ref, to=[f"h{K.number}"]).result(timeout=HANGS_S)
        time.sleep(0.1)
        a.work.board.publish("gaps", ref._id)
        a.hear("held")
        for h in (H, K, D, E):
            a.crawl(h)
        c.broadcast(ref, to=[f"h{h.number}" for h in (D, E)])
        a.hear("over")

    def parent() -> Any:
        pulling = D.cluster_node.plan_runner.cells.links.pulling.values()
        numbers = {one.parent for one in pulling}
        return next((h for h in (H, K) if h.number in numbers), None)

    def read(c: Any) -> None:
        ref = a.work.ref(c, "gaps")
        c.wait([ref])
        a.say("held")
        time.sleep(0.2 + 1.0 * a.rng.random())
        a.die(E)
        time.sleep(0.2 + 0.8 * a.rng.random())
        host = parent()
        if host is None:
            raise WrongEnd("the copy has come before its parent could die")
        a.die(host)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "gaps"))
        a.say("over")

    a.run(H, "put", put, False)
    a.run(D, "read", read)


def untold(a: Aim) -> None:
    """A fetch that was planned while the manager died is planned again."""
    a.must(manager=1)
    H, R = a.some(2)
    leaf = a.leaf(20_000)

    def read(c: Any) -> None:
        ref = a.work.ref(c, "untold")
        c.wait([ref])
        a.message_fault(Distribute, lambda s, r: r != R.place or a.kill_manager())
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "untold"))
        a.say("over")

    a.offer(H, leaf, "untold")
    a.run(R, "read", read)


def drained(a: Aim) -> None:
    """A host that leaves waits until all who hold what it has put are served."""
    a.must(cut=1, leave=1)
    M, R = a.some(2)
    leaf = a.leaf(20_000)

    def read(c: Any) -> None:
        ref = a.work.ref(c, "drained")
        c.wait([ref])
        time.sleep(0.05)
        a.say("held")
        a.cut(a.hosts[0], R, 0.6)
        a.leave(M)
        time.sleep(1.0)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "drained"))

    a.offer(M, leaf, "drained", until="held", strict=False)
    a.run(R, "read", read)


def gathered(a: Aim) -> None:
    """A host that leaves ends what comes to it first."""
    a.must(crawl=1, leave=1)
    A, L = a.some(2)
    leaves = [a.leaf(BIG), a.leaf(BIG)]

    def ask(c: Any) -> None:
        refs = [c.put(leaf.array()) for leaf in leaves]
        a.crawl(A)
        future = c.gather(refs, to=f"h{L.number}")
        time.sleep(0.05)
        a.leave(L)
        future.result(timeout=HANGS_S)

    a.run(A, "ask", ask)


def abandoned(a: Aim) -> None:
    """A gather fails while it brings an object that a program there waits for: the program gets it
    in another way."""
    a.must(crawl=2, die=1)
    A, B, D = a.some(3)
    x, y = a.leaf(BIG), a.leaf(BIG)

    def ask(c: Any) -> None:
        refs = [a.work.ref(c, "x"), a.work.ref(c, "y")]
        c.wait(refs)
        for host in (A, B):
            a.crawl(host)
        future = c.gather(refs, to=f"h{D.number}")
        time.sleep(0.05)
        a.say("begun")
        time.sleep(0.1)
        a.die(B)
        try:
            future.result(timeout=HANGS_S)
        except ObjectLostError:
            a.say("failed")
        else:
            raise WrongEnd("a gather of an object that was lost has not failed")
        a.hear("read")

    def read(c: Any) -> None:
        a.hear("begun")
        a.read(c, x, "x")
        a.say("read")

    a.offer(A, x, "x")
    a.offer(B, y, "y", strict=False)
    a.run(A, "ask", ask)
    a.run(D, "read", read)


def no_room(a: Aim) -> None:
    """A broadcast to a host without room ends with an error."""
    a.must(full=1)
    A, D = a.some(2)
    leaf = a.leaf(BIG)

    def fill(c: Any) -> None:
        views = []
        try:
            for index in range(60):
                views.append(c.get(c.put(np.full(BIG, index))))
        except Exception as error:
            if "Full" not in type(error).__name__:
                raise
            a.struck["full"] += 1
        a.say("full")
        a.hear("over")

    def ask(c: Any) -> None:
        ref = c.put(leaf.array())
        a.hear("full")
        try:
            c.broadcast(ref, to=[f"h{D.number}"]).result(timeout=HANGS_S)
        except TimeoutError as error:
            raise WrongEnd("a broadcast to a full host hangs") from error
        except Exception as error:
            if "Full" not in type(error).__name__:
                raise
        a.say("over")

    a.run(D, "fill", fill)
    a.run(A, "ask", ask)


def forgiven(a: Aim) -> None:
    """Hosts that could not be reached are tried again when their object is asked for again."""
    a.must(cut=2)
    H, K, A = a.some(3)
    leaf = a.leaf(20_000)

    def read(c: Any) -> None:
        ref = a.work.ref(c, "back")
        c.wait([ref])
        time.sleep(0.05)
        for host in (H, K):
            a.cut(A, host, 38.0)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "back"))
        a.say("over")

    a.offer(H, leaf, "back", to=K)
    a.run(A, "read", read)


def refused(a: Aim) -> None:
    """Who waits for a receiver that is refused, because the only holder has no room to read the
    object from its disk, is refused as well: the two may not wait for each other later."""
    a.must(full=1)
    H, A, B = a.some(3)
    leaf = a.leaf(BIG)

    def put(c: Any) -> None:
        ref = c.put(leaf.array())
        a.work.board.publish("away", ref._id)
        a.hear("A holds")
        a.hear("B holds")
        views = []

        try:
            for index in range(60):
                views.append(c.get(c.put(np.full(BIG, index))))
        except StoreFullError:
            a.struck["full"] += 1
        a.say("full")
        a.hear("refused")
        views.clear()
        a.hear("A has read")
        a.hear("B has read")

    def read(name: str, c: Any) -> None:
        ref = a.work.ref(c, "away")
        c.wait([ref])
        a.say(f"{name} holds")
        a.hear("full")
        if name == "A":
            a.message_fault(FetchRefused, lambda s, r: r != A.place or a.say("refused"))
        else:
            time.sleep(0.1)
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, name))
        a.say(f"{name} has read")

    a.run(H, "put", put)
    a.run(A, "A", partial(read, "A"))
    a.run(B, "B", partial(read, "B"))


def taken_back(a: Aim) -> None:
    """A host gives up a fetch, because its only reader has let go of the object, and brings the
    object when it is asked for again."""
    a.must(crawl=1, late=1, given_up=1)
    H, R = a.some(2)
    leaf = a.leaf(BIG)

    def read(c: Any) -> None:
        ref = a.work.ref(c, "back again")
        c.wait([ref])
        a.crawl(H)
        fetching = R.cluster_node.transfers.fetching
        try:
            c.get(ref, timeout=0.5)
        except HopliteTimeoutError:
            a.struck["late"] += bool(fetching)
        del ref
        c.wait([c.submit(make_once_more, Leaf(1, 0, 1), 0.0)])  # only now the drop is noticed
        a.struck["given_up"] += a.wait_for(1.0, lambda: not fetching)
        a.read(c, leaf, "back again")
        a.say("over")

    a.offer(H, leaf, "back again")
    a.run(R, "read", read)
