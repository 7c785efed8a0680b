"""What a Group over several emulated hosts carries: every value as itself, refs that stay held, and
a host without room."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.support.lan_programs import HOSTS, run_members

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster

WORKERS = 0  # of each host's
# Two on each host are neighbours and far from others at once.
PER_HOST = [pytest.param(1, marks=pytest.mark.soak), 2]


VALUES = """
    from tests.support.values import same_value, samples
    names = list(samples())
    for at, name in enumerate(names):
        made = samples()  # other ones for each name, because receivers may change theirs
        drawn = [made[names[(at + r) % len(names)]] for r in range(size)]
        mine = drawn[rank]
        def check(kind, got, expected):
            if not all(map(same_value, got, expected)):
                say(kind, name, repr(got), repr(expected))
        root = at % size
        check("broadcast", [g.broadcast(mine, root=root)], [drawn[root]])
        got = g.gather(mine, root=root)
        assert (got is None) == (rank != root)
        check("gather", got or drawn, drawn)
        check("allgather", g.allgather(mine), drawn)
        check("alltoall", g.alltoall([mine, (mine, rank)] * (size // 2) + [mine] * (size % 2)),
              [(one, r) if rank % 2 and rank < size // 2 * 2 else one
               for r, one in enumerate(drawn)])
    say("all", g.calls == 4 * len(names))
    for n in (3, 100_000):
        outs = [np.zeros(n) for _ in range(size)]
        got = g.allgather(np.full(n, rank + 1.0), out=outs)
        assert all(one is out and (out == r + 1).all() for r, (one, out) in
                   enumerate(zip(got, outs, strict=True)))
"""


@pytest.mark.parametrize("per_host", PER_HOST)
def test_every_value_is_carried_as_itself(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    found = run_members(cluster, lan, f"values {per_host}", VALUES, per_host)
    assert found == [["all True"]] * HOSTS * per_host


# Three calls of one kind and size: the nodes begin the second one and the third one by the plan of
# the first. Of later ones they repeat the plan, too, unless there is more, or the root is another.
REPEATED = """
    def total(of, ranks):
        return sum(of(r) for r in ranks)
    for kind in ("allreduce", "reduce", "reduce_scatter", "broadcast", "gather", "allgather",
                 "alltoall", "scatter", "scan", "exscan"):
        for turn, n in enumerate((30_000, 30_000, 30_000, 60_000, 30_000, 30_000, 90_000)):
            def given(r):
                return np.arange(n) % 100 + 1000.0 * r + 10_000 * turn
            mine, root, every = given(rank), turn % 2 if turn > 3 else 0, range(size)
            if kind == "broadcast":
                got, expected = g.broadcast(mine if rank == root else None, root=root), given(root)
            elif kind in ("reduce", "gather"):
                got = getattr(g, kind)(mine, root=root)
                expected = total(given, every) if kind == "reduce" else list(map(given, every))
                expected = expected if rank == root else None
            elif kind == "scatter":
                parts = [mine + to for to in every] if rank == root else None
                got, expected = g.scatter(parts, root=root), given(root) + rank
            elif kind == "alltoall":
                got = g.alltoall([mine + to for to in every])
                expected = [given(r) + rank for r in every]
            else:
                got = getattr(g, kind)(mine)
                below = range(rank + (kind == "scan"))
                mine_of = lambda: np.array_split(total(given, every), size)[rank]
                expected = {"allreduce": lambda: total(given, every),
                            "reduce_scatter": mine_of,
                            "allgather": lambda: list(map(given, every)),
                            "scan": lambda: total(given, below),
                            "exscan": lambda: total(given, below) if below else None}[kind]()
            mine[:] = -1  # what is given and what is got belongs to this rank alone
            pairs = zip(got, expected, strict=True) if type(expected) is list else [(got, expected)]
            for one, other in pairs:
                if not (one is other if other is None else np.array_equal(one, other)):
                    say(kind, turn, "rank", rank)
                elif one is not None and one.flags.writeable:
                    one[:] = -2
    say("all", g.calls)
"""


@pytest.mark.parametrize("per_host", PER_HOST)
def test_calls_are_repeated(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    found = run_members(cluster, lan, f"repeated {per_host}", REPEATED, per_host)
    assert found == [["all 70"]] * HOSTS * per_host


# As many bytes as engines reduce by themselves, as travel inside messages, and as need a plan; a
# mean of bytes has eight times as many.
FOLDS = """
    from hoplite_mp._common.reduction import fold
    for op in ("sum", "prod", "min", "max", "mean", "xor", np.hypot):
        for dtype in ("?", "u1", "f2", ">i4", "c16"):
            for nbytes in (400, 5_000, 16_300, 40_000):
                n = nbytes // np.dtype(dtype).itemsize
                drawn = [np.random.default_rng([r, n]).integers(0, 9, n).astype(dtype)
                         for r in range(size)]
                name = op if isinstance(op, str) else op.__name__
                try:
                    whole = fold(name, drawn)
                except TypeError:
                    continue
                for kind in ("allreduce", "reduce", "reduce_scatter", "scan"):
                    root = {"root": size - 1} if kind == "reduce" else {}
                    got = getattr(g, kind)(drawn[rank], op=op, **root)
                    expected = {"allreduce": whole, "reduce": whole if rank == size - 1 else None,
                                "reduce_scatter": np.array_split(whole, size)[rank],
                                "scan": fold(name, drawn[: rank + 1]).astype(whole.dtype)}[kind]
                    if not (got is expected or same_value(got, expected)):
                        say(kind, op, dtype, nbytes, "rank", rank, got, expected)
    say("all", g.calls)
"""


@pytest.mark.parametrize("per_host", PER_HOST)
def test_reductions_of_all_operators_and_sizes(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    program = "from tests.support.values import same_value\n" + textwrap.dedent(FOLDS)
    found = run_members(cluster, lan, f"folds {per_host}", program, per_host)
    assert found == [[found[0][0]]] * HOSTS * per_host
    assert re.fullmatch(r"all \d{3,4}", found[0][0])


def test_reductions_refuse_on_every_rank(cluster: UpCluster, lan: Lan) -> None:
    program = """
        from tests.support.values import reducible, samples
        for name, x in samples().items():
            if reducible(x):
                continue
            for kind in ("allreduce", "reduce", "reduce_scatter"):
                try:
                    getattr(g, kind)(x if rank == 1 else np.ones(3))
                    say(name, "was taken")
                except TypeError as error:
                    if f"rank 1: {kind} takes arrays, numbers and bools, not" not in str(error):
                        say(name, error)
        try:
            g.allgather(threading.Lock() if rank == 2 else 1)
        except TypeError as error:
            say(error)
        say(g.allreduce(np.ones(1))[0])
        """
    found = run_members(cluster, lan, "refused", program)
    assert found[0][0].startswith("rank 2: cannot pickle value of type 'lock'")
    assert found == [[found[0][0], "3.0"]] * HOSTS


@pytest.mark.parametrize("per_host", PER_HOST)
def test_refs_inside_stay_held(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    """Their giver has let go, and left, when the others come to read them."""
    program = """
        first = g.broadcast({"r": c.put(np.full(200_000, 7))} if rank == 0 else None)["r"]
        listed = g.allgather([c.put(np.full(200_000, rank))])
        swapped = g.alltoall([[c.put((rank, to))] for to in range(size)])
        if rank == 0:
            del first, listed, swapped
            g.close()
            return
        while 0 in g.alive:
            time.sleep(0.01)
        time.sleep(0.3)  # what the giver held is let go everywhere
        say(c.get(first).max(), [int(c.get(one[0]).max()) for one in listed])
        say([c.get(one[0]) for one in swapped] == [(r, rank) for r in range(size)])
        """
    size = HOSTS * per_host
    found = run_members(cluster, lan, f"refs {per_host}", program, per_host)
    assert found[0] == [""]
    assert found[1:] == [[f"7 {list(range(size))}", "True"]] * (size - 1)


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "gather", "alltoall"])
def test_a_host_without_room(cluster: UpCluster, lan: Lan, kind: str) -> None:
    program = f"""
        kind = {kind!r}
        calls = {{
            "allreduce": lambda x: g.allreduce(x), "broadcast": lambda x: g.broadcast(x, root=1),
            "gather": lambda x: g.gather({{"x": x}}), "alltoall": lambda x: g.alltoall([x] * size),
        }}
        try:
            calls[kind](np.zeros(300 << 20 if rank == 1 else 8, np.uint8))
        except Exception as error:
            say(type(error).__name__, error)
        say(g.allgather(rank), g.calls)
        """
    found = run_members(cluster, lan, f"room {kind}", program)
    text = found[0][0]
    assert found == [[text, "[0, 1, 2] 2"]] * HOSTS
    assert text.startswith("StoreFullError rank 1: put of ")
    assert re.search(r"store of h\d", text)
    assert "256 MiB" in text
