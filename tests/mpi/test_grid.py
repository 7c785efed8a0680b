"""Every call of a Group: with every dtype, blocking and in the background, with and without `out=`,
for groups of one member and of several, against NumPy.

The shape of the grid is that of mpi4py's tests: operation × payload × mode. Left out is what a
Group does not have: derived datatypes, Alltoallw, reductions of objects.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.group_members import in_threads
from tests.support.values import same_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster, Group

CODES = "?bhilqBHILQefdgFDG"
UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
# Every kind of call takes the kernels in the same way, so not each kind needs each of them.
REDUCING = [
    *(("allreduce", op) for op in UFUNCS),
    *(
        (kind, op)
        for kind in ("reduce", "reduce_scatter", "scan", "exscan")
        for op in ("sum", "max")
    ),
]
SIZES = [1, pytest.param(2, marks=pytest.mark.soak), 3]
CARRYING = ("broadcast", "gather", "scatter", "allgather", "alltoall")
MODES = ("plain", "out", "in place", "async")
OBJECTS: list[Any] = [
    None, True, -7, 2**63 - 1, -2.17, 2 - 3j, "text", [1, "a"], (1, None), {"k": [1.5]}, {1, 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import hoplite_mp

    with hoplite_mp.Cluster(workers=0, memory="256MiB") as made:
        yield made


def part(code: str, rank: int, shape: tuple[int, ...] = (6, 2)) -> Any:
    """Small whole numbers: their sums and products are exact in every dtype but the narrowest."""
    return (np.arange(np.prod(shape)).reshape(shape) % 3 + rank % 2).astype(code)


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, but a long double has bits that are no part of its value."""
    if a.dtype.char in "gG":
        return bool(a.dtype == b.dtype) and np.array_equal(a, b)
    return same_array(a, b)


def folded(op: str, parts: list[Any]) -> Any:
    """As a Group does: numbers of half precision are rounded once."""
    wide = np.float32 if parts[0].dtype == np.float16 else parts[0].dtype
    with np.errstate(all="ignore"):
        total = functools.reduce(UFUNCS[op], [one.astype(wide) for one in parts])
    return total.astype(parts[0].dtype)


def expected(kind: str, op: str, root: int, parts: list[Any], rank: int) -> Any:
    size = len(parts)
    if kind == "scan":
        return folded(op, parts[: rank + 1])
    if kind == "exscan":
        return folded(op, parts[:rank]) if rank else None
    if kind == "reduce_scatter":
        return np.array_split(folded(op, parts), size)[rank]
    if kind == "reduce":
        return folded(op, parts) if rank == root else None
    return folded(op, parts)


def call(g: Group, kind: str, mode: str, args: tuple[Any, ...], wanted: Any) -> Any:
    """The call in that mode; what it returned."""
    if mode == "async":
        return getattr(g, kind + "_async")(*args).result(20)
    if mode == "plain":
        return getattr(g, kind)(*args)
    out = np.empty_like(wanted) if wanted is not None else np.empty(1)
    x = args[0]
    if mode == "in place" and type(x) is np.ndarray and x.shape == out.shape:
        out = x
    got = getattr(g, kind)(*args, out=out)
    assert got is None or got is out
    return got


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "op"), REDUCING)
def test_reductions(cluster: Cluster, kind: str, op: str, size: int) -> None:
    def body(g: Group) -> int:
        checked = 0
        for code in CODES:
            for mode in MODES:
                root = checked % size
                parts = [part(code, rank) for rank in range(size)]
                mine = parts[g.rank].copy()
                wanted = expected(kind, op, root, parts, g.rank)
                args = (mine, op, root) if kind == "reduce" else (mine, op)
                got = call(g, kind, mode, args, wanted)
                assert (got is None) == (wanted is None), (code, mode)
                assert got is None or equal(got, wanted), (code, mode, got, wanted)
                assert got is None or got.flags.writeable
                checked += 1
        return checked

    found = in_threads(cluster, f"{kind} {op} {size}", size, body)
    assert found == [len(CODES) * len(MODES)] * size, found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CARRYING)
def test_arrays(cluster: Cluster, kind: str, size: int) -> None:
    """Of different lengths, too: nothing that is gathered or spread needs to be alike."""
    modes = ("plain", "out", "async") if kind in ("broadcast", "scatter") else ("plain", "async")

    def body(g: Group) -> int:
        checked = 0
        for code in CODES:
            for mode in modes:
                for root in range(size):
                    parts = [part(code, r, (r + 1,)) for r in range(size)]
                    rows = [[parts[r] + r2 for r2 in range(size)] for r in range(size)]
                    here = g.rank == root
                    wanted: Any = parts
                    args: tuple[Any, ...] = (parts[g.rank],)
                    if kind == "broadcast":
                        wanted, args = parts[root], (parts[root] if here else None, root)
                    elif kind == "scatter":
                        wanted, args = rows[root][g.rank], (rows[root] if here else None, root)
                    elif kind == "gather":
                        wanted, args = (parts if here else None), (parts[g.rank], root)
                    elif kind == "alltoall":
                        wanted, args = [rows[r][g.rank] for r in range(size)], (rows[g.rank],)
                    got = call(g, kind, mode, args, wanted)
                    pairs = (
                        zip(got, wanted, strict=True) if type(wanted) is list else [(got, wanted)]
                    )
                    assert all(one is two is None or equal(one, two) for one, two in pairs)
                    checked += 1
        return checked

    found = in_threads(cluster, f"{kind} {size}", size, body)
    assert found == [len(CODES) * len(modes) * size] * size, found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CARRYING)
def test_objects(cluster: Cluster, kind: str, size: int) -> None:
    def body(g: Group) -> int:
        checked = 0
        for x in [*OBJECTS, OBJECTS]:
            for root in range(size):
                here = g.rank == root
                if kind == "broadcast":
                    assert g.broadcast(x if here else None, root) == x
                elif kind == "scatter":
                    assert g.scatter([x] * size if here else None, root) == x
                elif kind == "gather":
                    assert g.gather(x, root) == ([x] * size if here else None)
                elif kind == "allgather":
                    assert g.allgather(x) == [x] * size
                else:
                    assert g.alltoall([x] * size) == [x] * size
                checked += 1
        return checked

    found = in_threads(cluster, f"objects {kind} {size}", size, body)
    assert found == [(len(OBJECTS) + 1) * size] * size, found


@pytest.mark.parametrize("size", SIZES)
def test_messages(cluster: Cluster, size: int) -> None:
    """Every way of sending with every way of receiving, round the ring and to oneself."""

    def body(g: Group) -> int:
        checked = 0
        for x in [*OBJECTS, OBJECTS]:
            for to, source in (((g.rank + 1) % size, (g.rank - 1) % size), (g.rank, g.rank)):
                g.send(x, to)
                assert g.recv(source) == x
                assert g.sendrecv(x, to, source, tag=3, recv_tag=3) == x
                late = [g.recv_async(source, tag) for tag in (1, 2, 1)]
                for tag in (2, 1, 1):
                    g.send((x, tag), to, tag)
                assert [one.result(20) for one in late] == [(x, 1), (x, 2), (x, 1)]
                g.send(x, to, 9)
                assert g.probe(source, 9) == (source, 9)
                assert g.recv(source, 9, with_source=True) == (x, source)
                checked += 1
        return checked

    found = in_threads(cluster, f"messages {size}", size, body)
    assert found == [(len(OBJECTS) + 1) * 2] * size, found
