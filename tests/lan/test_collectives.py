"""Collectives on refs over emulated hosts: results, places, and what is left afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import TLS_FIRST, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """
rng = np.random.default_rng(5)
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
hosts = [node for node in c.nodes if node.workers]
def make(seed, shape=(1 << 20,), dtype=np.float32, order="C"):
    time.sleep(0.05)
    made = np.random.default_rng(seed).standard_normal(shape) * 100
    return np.asarray(made.astype(dtype), order=order)
def spread(n, *args):
    return [c.submit(make, seed, *args) for seed in range(n)]
def total(n, *args):
    return [make(seed, *args) for seed in range(n)]
"""


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_FIRST)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    made = UpCluster(lan, tls=request.param, attaches=not request.param)
    yield made
    assert made.end() == [0, 0, 0]


def said(cluster: UpCluster, lan: Lan, program: str) -> list[str]:
    import textwrap

    return cluster.run(lan[1], SETUP + textwrap.dedent(program)).split("\n")[:-1]


def test_reductions_of_what_tasks_have_made_everywhere(cluster: UpCluster, lan: Lan) -> None:
    """The sources stay where they are; every dtype class, every op class."""
    dtypes = "float32 float64 int32 float16 int64 bool complex64"
    if cluster.tls:  # the same bytes by another way
        dtypes = "float32 float16"
    out = said(
        cluster,
        lan,
        f"""
        for dtype in (np.dtype(name).type for name in {dtypes.split()}):
            for op in ("sum", "max", "mean"):
                if dtype is np.complex64 and op == "max" or dtype is np.bool_ and op == "mean":
                    continue
                refs = spread(6, (400, 301), dtype)
                arrays = total(6, (400, 301), dtype)
                got = c.get(c.reduce(refs, op=op, reproducible=True))
                wide = [a.astype(np.float32) for a in arrays] if dtype is np.float16 else arrays
                if op == "mean" and np.dtype(dtype).kind in "biu":
                    wide = [a.astype(np.float64) for a in arrays]
                expected = wide[0]
                for one in wide[1:]:
                    expected = np.maximum(expected, one) if op == "max" else np.add(expected, one)
                if op == "mean":
                    expected = expected / np.asarray(6, expected.dtype)
                kind = np.dtype(dtype).kind
                wider = op == "mean" and kind in "biu"
                expected = expected.astype(np.float64 if wider else dtype)
                assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
                assert np.array_equal(got, expected), (dtype, op)
        print("same")
        """,
    )
    assert out == ["same"]


def test_placed_where_it_was_asked_for(cluster: UpCluster, lan: Lan) -> None:
    out = said(
        cluster,
        lan,
        """
        refs = spread(5)
        expected = sum(total(5))
        for node in hosts:
            result = c.reduce(refs, to=node)
            c.wait(result)
            assert c.locations(result) == [node.id], (c.locations(result), node.id)
            assert np.allclose(c.get(result), expected, rtol=1e-4, atol=1e-2)
            assert result.contributors == (0, 1, 2, 3, 4)
        mean = c.get(c.reduce(refs, op="mean", to=hosts[0]))
        assert np.allclose(mean, expected / 5, rtol=1e-4, atol=1e-2)
        everywhere = c.allreduce(refs, to=hosts)
        c.wait(everywhere)
        assert set(c.locations(everywhere)) >= {node.id for node in hosts}
        assert np.allclose(c.get(everywhere), expected, rtol=1e-4, atol=1e-2)
        slices = c.reduce_scatter(refs)
        for got, part in zip(c.get(slices), np.array_split(expected, 5)):
            assert np.allclose(got, part, rtol=1e-4, atol=1e-2)
        print("placed")
        """,
    )
    assert out == ["placed"]


def test_copies(cluster: UpCluster, lan: Lan) -> None:
    out = said(
        cluster,
        lan,
        """
        mine = c.put(rng.standard_normal(1 << 19))
        c.broadcast(mine).result(timeout=60)
        assert set(c.locations(mine)) == {node.id for node in c.nodes}
        refs = spread(6)
        c.gather(refs).result(timeout=60)
        me = c.locations(c.put(0))[0]
        assert all(me in c.locations(ref.ref) for ref in refs)
        refs = spread(6)
        c.allgather(refs, to=hosts).result(timeout=60)
        for ref in refs:
            assert {node.id for node in hosts} <= set(c.locations(ref.ref))
        matrix = [spread(3), spread(3)]
        c.alltoall(matrix, to=hosts).result(timeout=60)
        for row in matrix:
            for node, ref in zip(hosts, row):
                assert node.id in c.locations(ref.ref)
        def sums(*arrays):
            return [float(np.abs(a).sum()) for a in arrays]
        expected = sums(*total(6))
        assert c.submit(sums, *refs).result() == expected
        print("copied")
        """,
    )
    assert out == ["copied"]


def test_the_first_to_be_ready(cluster: UpCluster, lan: Lan) -> None:
    out = said(
        cluster,
        lan,
        """
        def slow(seed):
            time.sleep(1.5 if seed == 1 else 0)
            return make(seed)
        def bad(seed):
            raise ValueError("no gradient today")
        refs = [c.submit(bad if seed == 2 else slow, seed) for seed in range(5)]
        result = c.reduce(refs, num=3)
        got = c.get(result)
        assert len(result.contributors) == 3 and 2 not in result.contributors
        assert np.allclose(got, sum(make(i) for i in result.contributors), rtol=1e-4, atol=1e-2)
        try:
            c.get(c.reduce(refs, num=5))
        except hoplite_mp.ReduceError as error:
            print(type(error).__name__)
        try:
            c.get(c.reduce([c.submit(make, 1, (1 << 18,)), c.submit(make, 2, (1 << 19,))]))
        except ValueError as error:
            print("differ" in str(error))
        """,
    )
    assert out == ["ReduceError", "True"]


def test_one_of_each_group_is_reduced_with_the_bits_of_any_other(
    cluster: UpCluster, lan: Lan
) -> None:
    """Every seed is made on two hosts; one replica of the second group fails."""
    out = said(
        cluster,
        lan,
        """
        def bad():
            raise ValueError("no gradient today")
        at = [c.options(node=host) for host in hosts]
        groups = [[4, 5], [0, 1], [2, 3]]
        expected = (make(2) + make(0)) + make(1)
        for call, places in ((c.reduce, hosts[1]), (c.allreduce, hosts)):
            refs = [at[(2 * seed + k) % 3].submit(make, seed) for seed in range(3) for k in (0, 1)]
            for failed in (None, 0, 1):
                if failed is not None:
                    refs[failed] = at[failed].submit(bad)
                result = call(refs, one_of=groups, to=places, reproducible=True)
                assert np.array_equal(c.get(result), expected)
                found = result.contributors
                assert len(found) == 3 and [index // 2 for index in found] == [0, 1, 2], found
                assert failed not in found
                if failed is not None:
                    refs[failed] = at[0].submit(make, 0)
            result = call([at[0].submit(bad), at[1].submit(bad), *refs[2:]], one_of=groups)
            try:
                c.get(result)
            except hoplite_mp.ReduceError as error:
                print("1 of 3 groups of sources" in str(error), type(error.__cause__).__name__)
        """,
    )
    assert out == ["True ValueError"] * 2


def test_nothing_is_left(cluster: UpCluster, lan: Lan) -> None:
    """Copies and results go with the last ref, on every host."""
    out = said(
        cluster,
        lan,
        """
        def held():
            stats = hoplite_mp.current().stats()
            assert set(stats["nodes"]) == {node.id for node in c.nodes}
            assert stats["bytes_used"] == sum(n["bytes_used"] for n in stats["nodes"].values())
            return max(node["bytes_used"] for node in stats["nodes"].values())
        ref = c.put(rng.standard_normal(1 << 20))
        c.broadcast(ref).result(timeout=60)
        result = c.allreduce(spread(4), to=hosts)
        c.wait(result)
        del ref, result
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = held()
            if found < 3 << 20:
                break
            time.sleep(0.2)
        assert c.stats()["bytes_sent"] > 1 << 22
        print(found < 3 << 20, found)
        """,
    )
    assert out[0].startswith("True"), out
