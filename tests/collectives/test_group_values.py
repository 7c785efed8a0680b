"""What a Group carries arrives as itself, type and value; what cannot be reduced is refused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import hoplite_mp
from tests.support.group_members import in_threads
from tests.support.values import Colour, named, reducible, same_value, samples
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster, Group

SAMPLES = samples()
CARRIERS: dict[str, Callable[[Group, Any], list[Any]]] = {
    "broadcast": lambda g, x: [g.broadcast(x if g.rank == 0 else "ignored")],
    "gather": lambda g, x: g.gather(x, root=0) or [x] * g.size,
    "allgather": lambda g, x: g.allgather(x),
    "alltoall": lambda g, x: g.alltoall([x] * g.size),
}
REDUCTIONS: dict[str, Callable[[Group, Any], Any]] = {
    "allreduce": lambda g, x: g.allreduce(x),
    "reduce": lambda g, x: g.reduce(x, root=1),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x),
}


class Pair:
    """Two members in threads of the driver that make call after call."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.groups = [cluster.group(name, 2, rank, timeout=20) for rank in range(2)]

    def call(self, body: Callable[[Group], Any]) -> list[Any]:
        """What each rank's body returns or raises."""
        found: list[Any] = [None, None]

        def run(rank: int) -> None:
            try:
                found[rank] = body(self.groups[rank])
            except Exception as error:
                found[rank] = error

        thread = threading.Thread(target=run, args=(1,))
        thread.start()
        run(0)
        thread.join(30)
        assert not thread.is_alive()
        return found


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Iterator[Pair]:
    made = Pair(cluster, "values")
    yield made
    for group in made.groups:
        group.close()


@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_value_is_carried_as_itself(pair: Pair, kind: str, name: str) -> None:
    given_ = samples()[name]
    for got in pair.call(lambda g: CARRIERS[kind](g, given_)):
        assert isinstance(got, list), got
        assert all(same_value(given_, one) for one in got), (given_, got)


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_reduction_takes_arrays_numbers_and_bools(pair: Pair, kind: str, name: str) -> None:
    """The others are a TypeError on every rank, which names the rank and the type."""
    good, x = np.arange(3.0), samples()[name]
    found = pair.call(lambda g: REDUCTIONS[kind](g, x if g.rank else good))
    if reducible(x):
        assert not any(isinstance(one, TypeError) for one in found)
        return
    assert [type(one) for one in found] == [TypeError] * 2, found
    assert str(found[0]) == str(found[1])
    assert f"rank 1: {kind} takes arrays, numbers and bools, not " in str(found[0])
    assert type(x).__name__ in str(found[0])
    assert [one.tolist() for one in pair.call(lambda g: g.allreduce(good))] == [[0, 2, 4]] * 2


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.dates(),
    st.complex_numbers(), st.sampled_from([np.float32(1), np.int8(3), Colour.RED, np.str_("a")]),
)  # fmt: skip
DTYPES = st.one_of(
    npst.boolean_dtypes(), npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.datetime64_dtypes(), npst.timedelta64_dtypes(), npst.byte_string_dtypes(),
    npst.unicode_string_dtypes(), npst.array_dtypes(),
)  # fmt: skip
PLAIN_ARRAYS = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0))
NUMBERS = npst.arrays(npst.integer_dtypes(endianness="="), npst.array_shapes(max_side=4))
ARRAYS = st.one_of(
    PLAIN_ARRAYS,
    PLAIN_ARRAYS.map(np.asfortranarray),
    NUMBERS.map(lambda a: a[::2]),
    NUMBERS.map(lambda a: np.ma.MaskedArray(a, mask=a % 2 == 0)),
    NUMBERS.map(lambda a: named(a, "drawn")),
    NUMBERS.map(lambda a: a.reshape(1, -1).view(np.matrix)),
)
VALUES = st.recursive(
    st.one_of(ATOMS, ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(CARRIERS)), VALUES, VALUES)
def test_ranks_give_what_they_like(pair: Pair, kind: str, first: Any, second: Any) -> None:
    """Of different kinds in one call."""
    both = first, second
    for got in pair.call(lambda g: CARRIERS[kind](g, both[g.rank])):
        assert isinstance(got, list), got
        if kind == "broadcast":
            assert same_value(got[0], first)
        elif len(got) == 2 and kind != "gather":
            assert same_value(got[0], first)
            assert same_value(got[1], second)


def test_what_arrives_is_the_members_own(pair: Pair) -> None:
    """Arrays inside are writable, and nobody else sees what is written."""

    def body(group: Group) -> Any:
        given_ = {"a": np.zeros(50_000), "b": [np.zeros(3)]}
        got = group.broadcast(given_ if group.rank == 0 else None)
        for part in (*group.allgather(given_), got):
            part["a"][:] = group.rank + 1
            part["b"][0] += group.rank + 1
        group.barrier()
        return got["a"].max(), got["b"][0].tolist(), given_["a"].max()

    assert pair.call(body) == [(1.0, [1.0] * 3, 0.0), (2.0, [2.0] * 3, 0.0)]


def test_none_is_a_value_and_nothing_is_a_mistake(pair: Pair) -> None:
    assert pair.call(lambda g: g.broadcast(None)) == [None, None]
    assert pair.call(lambda g: (g.allgather(None), g.contributors)) == [([None] * 2, (0, 1))] * 2
    found = pair.call(lambda g: g.broadcast(root=1))
    assert [str(one) for one in found] == ["rank 1: the root of a broadcast must pass x"] * 2


def test_a_class_of_the_script_is_carried_by_value(cluster: Cluster) -> None:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

    def member(rank: int) -> Any:
        with hoplite_mp.current().group("by value", 2, rank) as group:
            got = group.allgather(Local(rank) if rank else (lambda: 5))
            return got[0](), got[1].x

    assert [f.result(30) for f in cluster.spmd(member, 2)] == [(5, 1)] * 2


def test_refs_inside_stay_held(cluster: Cluster) -> None:
    """Their giver lets go at once, and has left when they are read."""

    def member(rank: int) -> Any:
        here = hoplite_mp.current()
        with here.group("refs", 2, rank) as group:
            given_ = {"ref": here.put(np.full(200_000, rank))} if rank == 0 else None
            got = group.broadcast(given_)["ref"]
            one = group.broadcast(here.put([rank]) if rank == 0 else None)
            del given_
            if rank == 0:
                return None
        eventually(lambda: group.alive == (), "that all have left")
        return here.get(got).max(), here.get(one)

    assert [f.result(30) for f in cluster.spmd(member, 2)] == [None, (0, [0])]


def test_out_and_values_that_are_no_arrays(pair: Pair) -> None:
    def body(group: Group) -> Any:
        out = np.zeros(())
        assert group.broadcast(2.5, out=out) is out
        texts = []
        for value in ("text", np.ma.MaskedArray(np.zeros(()), mask=True)):
            with pytest.raises(TypeError, match="out takes an array") as caught:
                group.broadcast(value, out=out)
            texts.append(str(caught.value))
        with pytest.raises(TypeError, match="numpy array, not list"):
            group.broadcast(2.5, out=[])
        return float(out), texts

    (first, texts), second = pair.call(body)
    assert (first, texts) == second == (2.5, texts)
    assert "result is str" in texts[0]
    assert "MaskedArray" in texts[1]


def test_what_cannot_be_pickled_names_its_rank(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        with pytest.raises(
            TypeError, match=r"rank 1: cannot pickle value of type 'dict'"
        ) as caught:
            group.allgather({"a": threading.Lock()} if group.rank == 1 else 1)
        return str(caught.value), group.allgather(group.rank)

    found = in_threads(cluster, "unpicklable", 3, body)
    assert found == [(found[0][0], [0, 1, 2])] * 3
