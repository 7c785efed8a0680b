"""Reductions of Python objects by a function, over several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster


def test_objects_are_folded_at_the_leading_rank(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import operator, decimal
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
def where(a, b):
    return [*a, os.uname().nodename, *b]
def wrong(a, b):
    raise KeyError("folded", rank_here)
def peer(rank):
    global rank_here
    rank_here = rank
    with hoplite_mp.current().group("folds", 3, rank) as g:
        found = [g.allreduce([rank] * n, op=operator.add) for n in (1, 10_000)]
        assert found == [[0, 1, 2], [0] * 10_000 + [1] * 10_000 + [2] * 10_000]
        assert g.allreduce((1 << 80) + rank, op=operator.add) == 3 * (1 << 80) + 3
        assert g.reduce(decimal.Decimal(rank), op=max, root=2) == (2 if rank == 2 else None)
        assert g.scan(str(rank), op=operator.add) == "012"[: rank + 1]
        assert g.exscan({rank}, op=operator.or_) == [None, {0}, {0, 1}][rank]
        part = g.reduce_scatter(np.arange(6), op=operator.add)
        assert part.tolist() == [[0, 3], [6, 9], [12, 15]][rank]
        for call in (
            lambda: g.allreduce(1, op=wrong),
            lambda: g.allreduce(1, op=max if rank else min),
            lambda: g.allgather(1) if rank == 2 else g.allreduce(1, op=max),
        ):
            try:
                call()
            except Exception as error:
                print(rank, type(error).__name__, str(error), flush=True)
        folds = g.allreduce([], op=where)
        assert g.calls == 11, g.calls
        return folds, os.uname().nodename
found = c.get(c.options(node=hosts).spmd(peer, 3))
assert [one for one, _ in found] == [[found[0][1]] * 2] * 3, found
assert len({host for _, host in found}) == 3
""",
    )
    lines = [line.split(") ", 1)[1] for line in out.splitlines()]
    assert len(lines) == 9
    for rank in range(3):
        first, second, third = (line for line in lines if line.startswith(f"{rank} "))
        assert first == f"{rank} KeyError ('folded', 0)"
        assert "ValueError" in second
        assert "allreduce by builtins.min and allreduce by builtins.max" in second
        assert "ValueError" in third
        assert "allreduce by builtins.max and allgather()" in third


def test_a_host_dies_while_its_rank_folds(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import operator, signal
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
def peer(rank):
    def fold(a, b):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return a + b
    with hoplite_mp.current().group("fold dies", 3, rank) as g:
        found = g.allreduce([rank] * 5000, op=fold)[::5000]
        return found, g.contributors, g.allreduce([rank], op=operator.add)
peers = c.options(node=hosts, retries=0).spmd(peer, 3)
for one in peers[1:]:
    print(*one.result(40), sep="; ")
""",
    )
    assert out.splitlines() == ["[0, 1, 2]; (0, 1, 2); [1, 2]"] * 2


def test_refs_on_several_hosts_are_folded(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import operator
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
def give(rank):
    return [rank] * 5000
refs = [c.options(node=node).submit(give, rank) for rank, node in enumerate(hosts)]
for call in (c.reduce, c.allreduce):
    total = call(refs, op=operator.add)
    assert c.get(total, timeout=40)[::5000] == [0, 1, 2]
    print(total.contributors)
deadline = time.monotonic() + 30
while len(c.locations(total)) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
assert len(c.locations(total)) >= 3, c.locations(total)
placed = c.reduce(refs, op=operator.add, to=there)
while there.id not in c.locations(placed) and time.monotonic() < deadline:
    time.sleep(0.02)
print(there.id in c.locations(placed))
""",
    )
    assert out.splitlines() == ["(0, 1, 2)", "(0, 1, 2)", "True"]
