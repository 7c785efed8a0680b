"""Arrays made in the store, and memory that outlives what named it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import checksum, echo
from tests.support.store import StoreFile, client, header, held, objects
from tests.support.values import MIB, address, mib
from tests.support.waiting import settles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

SIZES = [5, 3000, 100_000]  # of float64: small, small, big


def used(cluster: Cluster) -> int:
    return int(cluster.stats()["bytes_used"])


@pytest.fixture
def unused() -> Iterator[Cluster]:
    """A cluster that held nothing before: its counts change by what the test itself does, because
    what an earlier test has let go of is given back whenever the node hears of it."""
    with hoplite_mp.Cluster(workers=0, memory="64MiB") as made:
        yield made


@pytest.mark.parametrize("size", SIZES)
def test_put_publishes_without_a_copy(cluster: Cluster, size: int) -> None:
    array = cluster.empty(size)
    assert array.shape == (size,)
    assert array.dtype == np.float64
    assert array.flags.writeable
    array[:] = np.arange(size)
    ref = cluster.put(array)
    assert not array.flags.writeable
    got = cluster.get(ref)
    assert address(got) == address(array)
    assert not got.flags.writeable
    assert cluster.submit(checksum, ref).result() == sum(range(size))
    other = cluster.put(array)  # the same bytes once more are another object
    assert other != ref
    assert address(cluster.get(other)) != address(array)
    assert (cluster.get(other) == array).all()


@pytest.mark.parametrize("size", SIZES)
def test_returning_it_from_a_task(cluster: Cluster, size: int) -> None:
    def made(size: int) -> Any:
        array = hoplite_mp.current().empty(size, np.int64)
        array[:] = np.arange(size)
        return array

    future = cluster.submit(made, size)
    assert (future.result() == np.arange(size)).all()
    block = header(cluster, future.ref)["block"]
    where = address(future.result()) - client(cluster).store_address
    assert 0 < where - block <= 4096, "the result does not lie in its own block"


@pytest.mark.parametrize("order", ["C", "F"])
def test_orders_and_reshaped_views(cluster: Cluster, order: str) -> None:
    for shape in ((30, 40), (300, 400)):
        array = cluster.empty(shape, np.float32, order=order)
        assert array.flags.f_contiguous == (order == "F")
        array[...] = np.arange(array.size).reshape(shape)
        ref = cluster.put(array)
        got = cluster.get(ref)
        assert address(got) == address(array)
        assert got.flags.f_contiguous == (order == "F")
        assert (got == np.arange(array.size).reshape(shape)).all()
        again = cluster.empty(shape, np.float32, order=order)
        again[...] = 7
        view = again.T.reshape(-1, order="F" if order == "C" else "C")
        assert np.shares_memory(view, again)
        whole = cluster.get(cluster.put(view))
        assert address(whole) == address(again)
        assert whole.shape == (again.size,)
        assert not again.flags.writeable, "the object's bytes could still be changed through it"


@pytest.mark.parametrize("size", [20_000, 300_000])
def test_a_part_of_it_is_copied(cluster: Cluster, size: int) -> None:
    array = cluster.empty(size, np.uint8)
    array[:] = np.arange(size) % 251
    prefixes = (4096 - 64 - 256, 64, 1)  # also the differences of the places of arrays in blocks
    parts = [array[:-1], array[::2], array[::-1], *(array[n:] for n in prefixes)]
    for part in parts:
        got = cluster.get(cluster.put(part))
        assert not np.shares_memory(got, array)
        assert (got == part).all()
    assert array.flags.writeable
    array[:] = 1
    assert checksum(cluster.get(cluster.put(array))) == size


def test_never_published_is_freed_with_its_last_view(unused: Cluster) -> None:
    before, count = used(unused), objects(unused)
    array = unused.empty(4 * MIB, np.uint8)
    view = array[5:].reshape(-1, 1)
    assert used(unused) >= before + 4 * MIB
    assert objects(unused) == count
    del array
    assert used(unused) >= before + 4 * MIB
    view[:] = 3
    del view
    settles(lambda: used(unused), before)


def test_small_ones_are_used_again(cluster: Cluster) -> None:
    places = set()
    for _ in range(5000):
        array = cluster.empty(1000, np.uint8)
        array[:] = 1
        places.add(address(array))
        del array
    assert len(places) < 50


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([(f"a rather long name of field {n}", "i4") for n in range(300)]),
        np.dtype("M8[25s]"),
        np.dtype("i4", metadata={"unit": "m"}),
        np.dtype({"names": ["x"], "formats": ["i4"], "offsets": [8], "titles": ["a title"]}),
    ],
    ids=["long", "unit", "metadata", "title"],
)
def test_a_dtype_that_does_not_fit_a_head(cluster: Cluster, dtype: Any) -> None:
    """Whether it is copied or not: the value is right, the array whole, and nothing is lost."""
    for count in (3, 200_000 // dtype.itemsize + 1):
        array = cluster.empty(count, dtype)
        raw = np.arange(array.nbytes, dtype=np.uint32).astype(np.uint8)
        array.view(np.uint8)[:] = raw
        ref = cluster.put(array)
        for got in (cluster.get(ref), cluster.submit(echo, ref).result()):
            assert got.dtype == dtype
            assert got.shape == (count,)
            assert not got.flags.writeable
        assert (array.view(np.uint8) == raw).all()
    before = used(cluster)
    del array, ref, got
    settles(lambda: used(cluster) < before, True)


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "error"),
    [
        (-1, float, "C", ValueError),
        ((2, -3), float, "C", ValueError),
        (3, object, "C", TypeError),
        (3, [("a", object)], "C", TypeError),
        (3, float, "K", ValueError),
        (1 << 45, float, "C", hoplite_mp.StoreFullError),
    ],
)
def test_what_empty_refuses(
    unused: Cluster, shape: Any, dtype: Any, order: str, error: type[Exception]
) -> None:
    before = used(unused)
    with pytest.raises(error):
        unused.empty(shape, dtype, order)
    settles(lambda: used(unused), before)


@pytest.mark.parametrize("shape", [(), 0, (3, 0), (0, 3)])
def test_empty_shapes(cluster: Cluster, shape: Any) -> None:
    array = cluster.empty(shape, np.int32)
    array[...] = 4
    got = cluster.get(cluster.put(array))
    assert got.shape == array.shape
    assert got.tolist() == array.tolist()


def test_published_in_a_list_it_is_copied(cluster: Cluster) -> None:
    array = cluster.empty(MIB, np.uint8)
    array[:] = 9
    got = cluster.get(cluster.put([array]))[0]
    array[:] = 1
    assert checksum(got) == 9 * MIB


def test_deleted_while_the_array_lives(cluster: Cluster) -> None:
    array = cluster.empty(MIB, np.uint8)
    array[:] = 5
    ref = cluster.put(array)
    cluster.delete(ref)
    others = [cluster.put(mib(1, seed)) for seed in range(20)]
    assert checksum(array) == 5 * MIB
    assert held(cluster, ref) == (1, 1)
    del others


def test_views_outlive_the_cluster_and_the_rest_is_given_back() -> None:
    with hoplite_mp.Cluster(workers=1, memory="128MiB") as cluster:
        store = StoreFile(cluster)
        refs = [cluster.put(mib(4, seed)) for seed in range(5)]
        kept = cluster.get(refs[1])[: 2 * MIB : 3]
        small = cluster.get(cluster.put(np.arange(100)))
        text = cluster.get(cluster.put({"in": np.arange(1000)}))["in"]
        mine = cluster.empty(MIB, np.uint8)
        mine[:] = 3
        published = cluster.empty(MIB, np.uint8)
        published[:] = 4
        cluster.put(published)
        result = cluster.submit(echo, refs[2]).result()
        cluster.delete(refs[1])
        assert store.allocated() > 20 * MIB
    wanted = 4 * MIB + 4 * MIB + MIB + MIB
    try:
        assert wanted <= store.allocated() < wanted + MIB
        assert (kept == mib(4, 1)[: 2 * MIB : 3]).all()
        assert (result == mib(4, 2)).all()
        assert small.tolist() == list(range(100))
        assert text.tolist() == list(range(1000))
        assert checksum(mine) == 3 * MIB
        assert checksum(published) == 4 * MIB
        assert not published.flags.writeable
        with pytest.raises(hoplite_mp.ClosedError):
            cluster.get(refs[0])
        with pytest.raises(hoplite_mp.ClosedError):
            cluster.put(1)
        with pytest.raises(hoplite_mp.ClosedError):
            cluster.empty(3)
        mine[:] = 1
        del mine, kept, result, published, refs
    finally:
        store.close()


def test_memory_that_is_not_needed_goes_back_to_the_system() -> None:
    config = hoplite_mp.Config(memory_idle_s=0.2, populate_ahead_bytes=0)
    with hoplite_mp.Cluster(workers=1, memory="128MiB", config=config) as cluster:
        store = StoreFile(cluster)
        try:
            for _ in range(2):  # not only the first time
                ref = cluster.put(mib(30))
                assert store.allocated() >= 30 * MIB
                del ref
                settles(lambda: store.allocated() < 4 * MIB, True)
        finally:
            store.close()
