"""Objects that several hosts hold, and whose owners die."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.copies import OrphansReported, OwnerQuery
from hoplite_mp._simulation.oracle.values import make_once_more
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from tests.aimed.aim import Aim

__all__ = [
    "asked_early", "carried", "deleted_early", "kept", "met_too_late", "orphans", "orphans_twice",
    "sent_home",
]  # fmt: skip


def carried(a: Aim) -> None:
    """A value that a Group broadcasts has refs of objects elsewhere, which their hosts keep
    for its reader."""
    a.must(cut=1)
    S, R, H = a.some(3)
    one, two = a.leaf(100), a.leaf(100)

    def send(c: Any) -> None:
        x, y = a.work.ref(c, "x"), c.put(two.array())
        c.wait([x])
        time.sleep(0.05)
        a.say("held")
        time.sleep(0.05)
        with c.group("carried", 2, 0) as g:
            a.cut(R, H, 0.4)
            g.broadcast({"refs": [x, y], "pad": bytes(64 << 10)}, root=0)
            del x, y

    def receive(c: Any) -> None:
        with c.group("carried", 2, 1) as g:
            got = g.broadcast(None, root=0)
            time.sleep(0.6)
            for leaf, ref in zip((one, two), got["refs"], strict=True):
                a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "carried"))

    a.offer(H, one, "x", until="held")
    a.run(S, "send", send)
    a.run(R, "receive", receive)


def kept(a: Aim) -> None:
    """What was broadcast to a host is kept for the processes there, also when its first owner
    lets go or dies."""
    A, B, C = a.some(3)
    dies, leaf = a.rng.random() < 0.5, a.leaf(3000)
    a.must(die=int(dies))

    def put(c: Any) -> None:
        ref = c.put(leaf.array())
        c.broadcast(ref, to=[f"h{B.number}"]).result(timeout=HANGS_S)
        if dies:
            time.sleep(0.7)
        a.work.board.publish("kept", ref._id)
        a.hear("held")

    def hold(c: Any) -> None:
        ref = a.work.ref(c, "kept")
        time.sleep(0.05)
        a.say("held")
        if dies:
            a.late(0.05, a.die, A)
        time.sleep(0.7)
        if not dies:
            a.work.board.publish("passed", ref._id)
            a.hear("read")
        else:
            a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "kept"))

    def meet(c: Any) -> None:
        a.read(c, leaf, "passed")
        a.say("read")

    a.run(A, "put", put, strict=not dies)
    a.run(C if dies else B, "hold", hold)
    if not dies:
        a.run(C, "meet", meet)


def orphans(a: Aim) -> None:
    """An object whose owner has died is asked for, released, and met anew, while the reports
    about it are gathered."""
    a.must(stop=1, die=1, cut=1)
    H, K, Q, R = a.some(4)
    leaf = a.leaf(20_000)
    dies = a.rng.random() < 0.5
    a.must(manager=int(dies))

    def put(c: Any) -> None:
        ref, other = c.put(leaf.array()), c.put(leaf.array())
        a.work.board.publish("other", other._id)
        a.work.board.publish("orphan", ref._id)
        time.sleep(99)

    def keep(c: Any) -> None:
        value = a.read(c, leaf, "orphan")
        more = a.read(c, leaf, "other")
        a.say("kept")
        a.hear("over")
        del value, more

    def hold(c: Any) -> None:  # on R: holds without reading, lets go during the round
        ref = a.work.ref(c, "orphan")
        a.hear("kept")
        time.sleep(0.05)
        a.stop(Q, 0.7)
        a.die(H)
        time.sleep(0.1)
        a.say("open")
        a.cut(a.hosts[0], K, 0.9)
        del ref

    def unread(c: Any) -> None:  # on hosts[0]: holds, reads during the round
        ref = a.work.ref(c, "orphan")
        a.hear("open")
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "orphan"))
        time.sleep(1.0)
        a.say("round")

    def meet(c: Any) -> None:
        other = a.work.ref(c, "other")
        a.hear("open")
        a.read(c, leaf, "orphan")
        a.say("met")
        del other

    def last(c: Any) -> None:
        a.hear("round")
        a.hear("met")
        time.sleep(0.5)
        if dies:
            a.message_fault(OwnerQuery, lambda s, r: a.kill_manager())
        a.read(c, leaf, "orphan")
        a.say("over")

    a.run(H, "put", put, False)
    a.run(K, "keep", keep)
    a.run(R, "hold", hold)
    a.run(a.hosts[0], "unread", unread)
    a.run(Q, "last", last)
    more = [h for h in a.hosts if h not in (H, K, Q, R, a.hosts[0])]
    a.run(more[0] if more else a.hosts[0], "meet", meet)


def orphans_twice(a: Aim) -> None:
    """The host that was to own an orphan dies, too, before all have reported."""
    a.must(stop=1, die=2)
    H, K, J, Q = a.some(4)
    first, second = sorted((K, J), key=lambda h: h.number)
    leaf = a.leaf(3000)

    def put(c: Any) -> None:
        ref = c.put(leaf.array())
        a.work.board.publish("orphan", ref._id)
        time.sleep(99)

    def keep(c: Any) -> None:
        value = a.read(c, leaf, "orphan")
        a.say(f"kept {a.world.processes.running.host}")
        a.hear("over")
        del value

    def meet(c: Any) -> None:
        a.hear(f"kept {K.place}")
        a.hear(f"kept {J.place}")
        time.sleep(0.05)
        a.die(H)
        time.sleep(0.5)
        a.stop(Q, 0.7)
        a.die(first)
        time.sleep(0.2)
        a.read(c, leaf, "orphan")
        a.say("over")

    a.run(H, "put", put, False)
    a.run(first, "keep", keep, False)
    a.run(second, "keep", keep)
    a.run(a.hosts[0], "meet", meet)


def asked_early(a: Aim) -> None:
    """A manager that was started again is asked who owns an object of a host that had died before,
    and has not heard yet from all what they hold: the host that asks waits for that."""
    a.must(die=1, cut=1, manager=1)
    H, K, Q, Z = a.some(4)
    leaf = a.leaf(3000)

    def put(c: Any) -> None:
        ref = c.put(leaf.array())
        a.work.board.publish("orphan", ref._id)
        time.sleep(99)

    def keep(c: Any) -> None:
        value = a.read(c, leaf, "orphan")
        a.say("kept")
        a.hear("over")
        del value

    def reports(s: int, r: int) -> bool:
        if s != Z.place:
            return True
        a.cut(a.hosts[0], Z, 0.3)  # so no owner is named before the manager dies
        a.late(0.01, a.kill_manager)
        a.late(0.011, a.say, "lost")
        return False

    def meet(c: Any) -> None:
        a.hear("kept")
        a.message_fault(OrphansReported, reports, arrives=False)
        a.die(H)
        a.hear("lost")
        a.read(c, leaf, "orphan")
        a.say("over")

    a.run(H, "put", put, False)
    a.run(K, "keep", keep)
    a.run(Q, "meet", meet)


def met_too_late(a: Aim) -> None:
    """An object of a dead owner is met on a host that has not heard who owns it now, after the
    manager has told the new owner and has died."""
    a.must(die=1, cut=1, manager=1)
    H, Q = a.some(2)
    K = a.hosts[0]  # the manager's own host, which always hears its words
    leaf = a.leaf(3000)

    def put(c: Any) -> None:
        ref, other = c.put(leaf.array()), c.put(leaf.array())
        a.work.board.publish("other", other._id)
        a.work.board.publish("orphan", ref._id)
        time.sleep(99)

    def keep(c: Any) -> None:
        value = a.read(c, leaf, "orphan")
        a.say("kept")
        a.hear("over")
        del value

    def meet(c: Any) -> None:
        other = a.work.ref(c, "other")  # so the manager will have something to tell this host
        a.hear("kept")
        time.sleep(0.05)
        a.message_fault(OrphansReported, named)
        a.die(H)
        a.hear("lost")
        time.sleep(0.01)
        a.read(c, leaf, "orphan")
        a.say("over")
        del other

    reported: set[int] = set()

    def named(s: int, r: int) -> bool:
        reported.add(s)
        if len(reported) < len(a.hosts) - 1:
            return True
        a.cut(a.hosts[0], Q, 0.3)  # the manager's answer does not get through
        a.late(0.01, a.kill_manager)
        a.late(0.011, a.say, "lost")
        return False

    a.run(H, "put", put, False)
    a.run(K, "keep", keep)
    a.run(Q, "meet", meet)


def deleted_early(a: Aim) -> None:
    """A process deletes results of another host before they are made, and nothing is left of
    them on either host."""
    A, B = a.some(2)
    leaf = a.leaf(50)

    def own(c: Any) -> None:
        refs = [c.submit(make_once_more, leaf, 0.3 + 0.01 * n).ref for n in range(3)]
        for n, ref in enumerate(refs):
            a.work.board.publish(f"pending {n}", ref._id)
        a.hear("deleted")
        time.sleep(0.2)

    def delete(c: Any) -> None:
        refs = [a.work.ref(c, f"pending {n}") for n in range(3)]
        time.sleep(0.05)
        c.delete(refs)
        time.sleep(0.05)
        del refs
        a.say("deleted")

    a.run(A, "own", own)
    a.run(B, "delete", delete)


def sent_home(a: Aim) -> None:
    """The result of a task is broadcast to the host that has sent the task, before that host has
    heard that the task is done."""
    A, B = a.some(2)
    leaf = a.leaf(40_000)
    a.must(cut=1)

    def own(c: Any) -> None:
        ref = c.options(node=f"h{B.number}").submit(make_once_more, leaf, 0.3).ref
        a.work.board.publish("result", ref._id)
        a.hear("sent")
        a.work.oracle.check_leaf(leaf, a.work.value(c, ref, "result"))

    def send(c: Any) -> None:
        a.hear("result")
        time.sleep(0.15)  # the task runs here by now
        ref = a.work.ref(c, "result")
        time.sleep(0.05)
        a.cut(A, B, 0.3)
        c.broadcast(ref, to=[f"h{A.number}"]).result(timeout=HANGS_S)
        a.say("sent")

    a.run(A, "own", own)
    a.run(B, "send", send)
