"""joblib's Parallel on our workers: arrays, results, pools, deaths, calls inside of calls."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import textwrap
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pandas as pd
import pytest
from joblib import Parallel, delayed, parallel_config

import hoplite_mp
import hoplite_mp.integrations.joblib as ours
from hoplite_mp._client.captured_arrays import CapturedArrays
from hoplite_mp.errors import NodeLostError
from hoplite_mp.integrations import _joblib_pools
from tests.lan import forked
from tests.support.waiting import announce, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "hoplite_mp"
LARGE = 1 << 18  # elements of float64: 2 MiB, above joblib's max_nbytes


@pytest.fixture(autouse=True, scope="module")
def workers() -> Iterator[None]:
    with parallel_config(backend=NAME, n_jobs=2):
        Parallel()(delayed(abs)(n) for n in range(4))
    yield
    ours.shutdown()


@pytest.fixture(autouse=True)
def with_ours(workers: None) -> Iterator[None]:
    with parallel_config(backend=NAME, n_jobs=2):
        yield


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of arrays that were stored, in order."""
    found: list[int] = []
    put = CapturedArrays._put

    def noting(self: CapturedArrays, array: Any) -> Any:
        found.append(array.nbytes)
        return put(self, array)

    monkeypatch.setattr(CapturedArrays, "_put", noting)
    return found


def own_cluster() -> hoplite_mp.Cluster:
    assert _joblib_pools._own is not None
    return _joblib_pools._own.cluster


def look(array: Any) -> tuple[float, bool]:
    return float(array.flat[0]), bool(array.flags.writeable)


class Holder:
    def __init__(self, array: Any) -> None:
        self.array = array


def look_deep(where: Any) -> list[tuple[float, bool]]:
    """In an object's attribute, a list, a table, or a closure."""
    if isinstance(where, Holder):
        return [look(where.array)]
    if isinstance(where, pd.DataFrame):
        return [look(where.to_numpy())]
    if callable(where):
        return [look(where())]
    return [look(one) for one in where]


# -- arrays ------------------------------------------------------------------------------------


def test_a_large_array_is_stored_once_and_read_in_place(stored: list[int]) -> None:
    array = np.full(LARGE, 3.0)
    found = Parallel(batch_size=1)(delayed(look)(array) for _ in range(12))
    assert found == [(3.0, False)] * 12
    assert stored == [array.nbytes]
    small = np.full(100, 4.0)
    assert Parallel()(delayed(look)(small) for _ in range(3)) == [(4.0, True)] * 3
    assert Parallel(max_nbytes=100)(delayed(look)(small) for _ in range(3)) == [(4.0, False)] * 3
    assert Parallel(max_nbytes=None)(delayed(look)(array) for _ in range(3)) == [(3.0, True)] * 3


def test_the_same_array_in_later_calls(stored: list[int]) -> None:
    array = np.full(LARGE, 3.0)
    with Parallel() as parallel:
        for _ in range(3):
            assert parallel(delayed(look)(array) for _ in range(4)) == [(3.0, False)] * 4
        assert len(stored) == 1
        array[:] = 5.0
        assert parallel(delayed(look)(array) for _ in range(4)) == [(5.0, False)] * 4
        assert len(stored) == 2
        for number in range(6, 12):  # at the place of the one before, as far as numpy can do it
            array = None
            array = np.full(LARGE, float(number))
            assert parallel(delayed(look)(array) for _ in range(2)) == [(number, False)] * 2
    assert len(stored) == 8


def test_arrays_anywhere_in_the_arguments(stored: list[int]) -> None:
    array = np.full(LARGE, 3.0)
    places = [
        Holder(array),
        [array, array],
        pd.DataFrame({"x": array}, copy=False),
        lambda: array,
        (np.asfortranarray(array.reshape(512, -1)), array[::2]),
    ]
    found = Parallel()(delayed(look_deep)(place) for place in places)
    assert [set(one) for one in found] == [{(3.0, False)}] * 5


def test_what_was_stored_goes_with_the_call() -> None:
    cluster = own_cluster()
    gc.collect()
    before = cluster.stats()["bytes_used"]
    with Parallel() as parallel:
        array = np.full(4 * LARGE, 3.0)
        parallel(delayed(look)(array) for _ in range(4))
        assert cluster.stats()["bytes_used"] > before + array.nbytes // 2
        array = None
        eventually(lambda: cluster.stats()["bytes_used"] <= before + (1 << 20))
        # Each array of a long series goes when its task is done.
        parallel(delayed(look)(np.full(LARGE, float(i))) for i in range(40))
        eventually(lambda: cluster.stats()["bytes_used"] <= before + (1 << 20))


def fill_row(out: Any, row: int) -> str:
    out[row] = row
    return type(out).__name__


def test_arrays_over_files_are_mapped_again(tmp_path: Path, stored: list[int]) -> None:
    out = np.memmap(tmp_path / "out", np.int64, "w+", shape=(6, 10))
    assert set(Parallel()(delayed(fill_row)(out, row) for row in range(6))) == {"memmap"}
    assert (out == np.arange(6)[:, None]).all()
    Parallel()(delayed(fill_row)(out[3:], row) for row in range(3))  # a part of it
    assert (out[3:] == np.arange(3)[:, None]).all()
    large = np.memmap(tmp_path / "large", np.float64, "w+", shape=LARGE)
    large[0] = 9.0
    assert Parallel()(delayed(look)(large) for _ in range(2)) == [(9.0, True)] * 2
    assert stored == []


def test_modes_of_large_arrays() -> None:
    array = np.full(LARGE, 3.0)
    for mode in ("c", None):
        assert Parallel(mmap_mode=mode)(delayed(look)(array) for _ in range(3)) == [(3.0, True)] * 3
    with pytest.raises(ValueError, match=r"mmap_mode='r\+'.*memmap"):
        Parallel(mmap_mode="r+")(delayed(look)(array) for _ in range(2))


def test_refs_among_the_arguments() -> None:
    ref = own_cluster().put(np.full(LARGE, 8.0))
    assert Parallel()(delayed(look)(ref) for _ in range(2)) == [(8.0, False)] * 2


def test_results_are_the_callers_own() -> None:
    small, large = Parallel()(delayed(np.ones)(n) for n in (3, LARGE))
    small += 1
    large += 1
    assert small.sum() == 6
    assert large.sum() == 2 * LARGE


# -- the generator of tasks, and of results ----------------------------------------------------


def test_a_generator_of_tasks_may_use_the_cluster() -> None:
    """It is run by the thread that sends the next batch, which is not that which collects."""
    cluster = own_cluster()

    def tasks() -> Iterator[Any]:
        for number in range(60):
            yield delayed(abs)(-cluster.submit(abs, number).result())

    assert Parallel(batch_size=1)(tasks()) == list(range(60))


def test_two_generators_of_results_at_once() -> None:
    one = Parallel(return_as="generator")(delayed(abs)(-i) for i in range(50))
    two = Parallel(return_as="generator_unordered")(delayed(abs)(-i) for i in range(50))
    assert [next(one), next(one)] == [0, 1]
    assert sorted(two) == list(range(50))
    assert list(one) == list(range(2, 50))


def test_calls_in_several_threads() -> None:
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        with parallel_config(backend=NAME, n_jobs=2):
            found[number] = Parallel()(delayed(pow)(number, i) for i in range(30))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number**i for i in range(30)] for number in range(4)}


# -- errors and ends ---------------------------------------------------------------------------


def outer(number: int) -> float:
    return inner(number)


def inner(number: int) -> float:
    return 1 / number


class Unsendable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def test_exceptions_have_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        Parallel()(delayed(outer)(number) for number in (1, 0))
    text = "".join(traceback.format_exception(caught.value))
    assert "outer" in text
    assert "return 1 / number" in text


@pytest.mark.parametrize("place", [0, 30])
def test_what_cannot_be_sent(place: int) -> None:
    """Also in a batch that is sent when others are done."""
    given = [Unsendable() if i == place else i for i in range(31)]
    with pytest.raises(pickle.PicklingError, match="not me"):
        Parallel(batch_size=1)(delayed(id)(one) for one in given)


def test_the_first_error_ends_the_others(tmp_path: Path) -> None:
    def fail_later() -> None:
        eventually((tmp_path / "runs").exists)
        raise LookupError("enough")

    began = time.monotonic()
    with Parallel() as parallel:
        with pytest.raises(LookupError, match="enough"):
            parallel(
                [delayed(announce)(tmp_path / "runs"), delayed(fail_later)()]
                + [delayed(announce)(tmp_path / f"{i}") for i in range(20)]
            )
        assert parallel(delayed(abs)(-i) for i in range(4)) == [0, 1, 2, 3]
    assert time.monotonic() - began < 30


def test_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        Parallel(timeout=0.2)(delayed(announce)(tmp_path / f"{i}") for i in range(2))
    assert Parallel()(delayed(abs)(-i) for i in range(4)) == [0, 1, 2, 3]


def test_options() -> None:
    with pytest.raises(TypeError, match=r"no option surprise; its options are cluster"):
        parallel_config(backend=NAME, surprise=1)
    with pytest.raises(ValueError, match=r"timeout= is an argument of joblib.Parallel"):
        parallel_config(backend=NAME, timeout=1)
    with pytest.raises(TypeError, match=r"hoplite_mp\.Cluster"):
        parallel_config(backend=NAME, cluster=3)


def die_once(path: Path) -> int:
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies(tmp_path: Path) -> None:
    assert Parallel()(delayed(die_once)(tmp_path / f"{i}") for i in range(2)) == [7, 7]
    with (
        parallel_config(backend=NAME, n_jobs=2, retries=0),
        pytest.raises(hoplite_mp.WorkerLostError, match=r"die\(\)"),
    ):
        Parallel()(delayed(die)() for _ in range(2))
    assert Parallel()(delayed(abs)(-i) for i in range(4)) == [0, 1, 2, 3]


CLUSTERS = """
import os, signal, sys, threading, time
import joblib, numpy as np, psutil
import hoplite_mp, hoplite_mp.integrations.joblib as ours
from joblib import Parallel, delayed, parallel_config
from hoplite_mp.integrations import _joblib_pools as joblib_pools

def announce(path):
    open(path, "w").close()
    time.sleep(60)
"""


def run(body: str, *args: object) -> str:
    command = [sys.executable, "-c", CLUSTERS + textwrap.dedent(body), *map(str, args)]
    done = forked.run(command, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_host_that_dies() -> None:
    """Its calls fail, and the next one starts other workers."""
    out = run(
        """
        def node():
            found = psutil.Process().children(recursive=True)
            return next(p for p in found if open(f"/proc/{p.pid}/comm").read() == "hoplite node\\n")
        def kill():
            os.kill(number, signal.SIGKILL)
            time.sleep(60)
        with parallel_config(backend="hoplite_mp", n_jobs=2):
            Parallel()(delayed(abs)(i) for i in range(4))
            number = node().pid
            try:
                Parallel()(delayed(kill)() for _ in range(2))
            except hoplite_mp.NodeLostError as error:
                print("lost")
            print(Parallel()(delayed(abs)(-i) for i in range(4)))
        """
    )
    assert out.split("\n")[:2] == ["lost", "[0, 1, 2, 3]"]


def test_interrupted_by_a_user(tmp_path: Path) -> None:
    out = run(
        """
        def interrupt():
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        with parallel_config(backend="hoplite_mp", n_jobs=2):
            threading.Thread(target=interrupt).start()
            try:
                Parallel()(delayed(announce)(sys.argv[1]) for _ in range(8))
            except KeyboardInterrupt:
                print("interrupted")
            print(Parallel()(delayed(abs)(-i) for i in range(4)))
        """,
        tmp_path / "runs",
    )
    assert out.split("\n")[:2] == ["interrupted", "[0, 1, 2, 3]"]


def test_in_a_forked_child_and_below_a_pool() -> None:
    out = run(
        """
        import multiprocessing, warnings
        def call(_=None):
            with parallel_config(backend="hoplite_mp", n_jobs=2), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pids = set(Parallel(batch_size=1)(delayed(os.getpid)() for _ in range(4)))
            print(pids == {os.getpid()}, flush=True)
        call()
        child = multiprocessing.get_context("fork").Process(target=call)
        child.start()
        child.join()
        print(child.exitcode)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(call, [0])  # where loky's and ours are sequential
        call()
        """
    )
    assert out.split() == ["False", "False", "0", "True", "False"]


# -- workers -----------------------------------------------------------------------------------


def pid_and_more(name: str = "OMP_NUM_THREADS") -> tuple[int, str | None]:
    time.sleep(0.01)
    return os.getpid(), os.environ.get(name)


def test_workers_are_used_again() -> None:
    first = {pid for pid, _ in Parallel(batch_size=1)(delayed(pid_and_more)() for _ in range(8))}
    second = {pid for pid, _ in Parallel(batch_size=1)(delayed(pid_and_more)() for _ in range(8))}
    assert len(first | second) <= 2
    more = Parallel(n_jobs=3, batch_size=1)(delayed(pid_and_more)() for _ in range(30))
    assert not {pid for pid, _ in more} & first


def blas_threads() -> set[int]:
    import threadpoolctl

    return {one["num_threads"] for one in threadpoolctl.threadpool_info()}


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_of_workers(threads: int) -> None:
    with parallel_config(backend=NAME, n_jobs=2, inner_max_num_threads=threads):
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
            found = Parallel()(delayed(pid_and_more)(name) for _ in range(2))
            assert {value for _, value in found} == {str(threads)}
        if threads == 1:  # more than there are CPUs are not taken everywhere
            assert set().union(*Parallel()(delayed(blas_threads)() for _ in range(2))) == {1}


def test_workers_of_an_open_cluster() -> None:
    with hoplite_mp.Cluster(3, memory="128MiB") as cluster:
        pids = set(cluster.run(os.getpid).values())
        with parallel_config(backend=NAME, cluster=cluster, n_jobs=-1):
            assert joblib.effective_n_jobs(-1) == 3
            found = Parallel(batch_size=1)(delayed(pid_and_more)() for _ in range(30))
            assert {pid for pid, _ in found} <= pids
            fewer = Parallel(n_jobs=2, batch_size=1)(delayed(pid_and_more)() for _ in range(30))
            assert len({pid for pid, _ in fewer}) <= 2
            array = np.full(LARGE, 3.0)
            assert Parallel()(delayed(look)(array) for _ in range(4)) == [(3.0, False)] * 4
    with (
        parallel_config(backend=NAME, cluster=cluster, n_jobs=2),
        pytest.raises(hoplite_mp.ClosedError),
    ):
        Parallel()(delayed(abs)(i) for i in range(2))


# -- calls inside of tasks ---------------------------------------------------------------------


def backend_inside() -> str:
    return type(Parallel(n_jobs=2)._backend).__name__


def inside(number: int, backend: str | None) -> list[int]:
    return list(Parallel(n_jobs=2, backend=backend)(delayed(pow)(number, i) for i in range(5)))


@pytest.mark.parametrize("backend", [None, NAME])
def test_calls_inside_of_tasks(backend: str | None) -> None:
    """By joblib's rule in threads; or, if asked for, on the same workers, of which none is free."""
    assert set(Parallel()(delayed(backend_inside)() for _ in range(2))) == {"ThreadingBackend"}
    found = Parallel(batch_size=1)(delayed(inside)(number, backend) for number in range(6))
    assert found == [[number**i for i in range(5)] for number in range(6)]


def test_workers_begin_on_the_nodes_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given cluster's first call was on a node that is gone by now."""
    gone = [("h7", 1)]
    with hoplite_mp.Cluster(workers=2) as c, parallel_config(backend=NAME, cluster=c):
        with monkeypatch.context() as patch:
            patch.setattr(_joblib_pools, "_places", lambda cluster: gone)
            with pytest.raises((ValueError, NodeLostError), match="h7"):
                Parallel(n_jobs=3)(delayed(abs)(-i) for i in range(3))
        assert Parallel(n_jobs=3)(delayed(abs)(-i) for i in range(3)) == [0, 1, 2]


def test_current_after_a_call_without_cluster_stays_the_users_cluster() -> None:
    out = run(
        """
        import hoplite_mp
        with hoplite_mp.Cluster(workers=1) as cluster:
            with parallel_config(backend="hoplite_mp", n_jobs=2):
                print(Parallel()(delayed(abs)(-i) for i in range(3)))
            print(hoplite_mp.current() is cluster)
            queue = hoplite_mp.Queue()
            cluster.submit(queue.put, 7).result(30)
            print(queue.get(timeout=30))
        try:
            hoplite_mp.current()
        except hoplite_mp.ClosedError as error:
            print(str(error).startswith("no cluster is open"))
        """
    )
    assert out.splitlines() == ["[0, 1, 2]", "True", "7", "True"]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    key: Any


def fail(key: Any) -> None:
    raise Frozen(key)


def fail_inside(key: Any) -> None:
    with parallel_config(backend=NAME, n_jobs=2):
        Parallel()(delayed(fail)(key) for _ in range(3))


@pytest.mark.parametrize("returned", ["list", "generator", "generator_unordered"])
@pytest.mark.parametrize("call", [fail, fail_inside])
def test_exception_that_refuses_attributes_fails_the_call(returned: str, call: Any) -> None:
    with pytest.raises(Frozen) as caught:
        list(Parallel(return_as=returned)(delayed(call)("k") for _ in range(3)))
    assert caught.value.key == "k"
    assert Parallel()(delayed(abs)(n) for n in range(3)) == [0, 1, 2]


@pytest.mark.parametrize("returned", ["list", "generator", "generator_unordered"])
@pytest.mark.parametrize("count", [3, 29])
def test_tasks_whose_iterator_raises_in_a_callback_fail_the_call(returned: str, count: int) -> None:
    def calls() -> Iterator[Any]:
        for n in range(count):
            yield delayed(abs)(n)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(Parallel(return_as=returned, pre_dispatch=2, batch_size=1)(calls()))
    assert Parallel()(delayed(abs)(n) for n in range(3)) == [0, 1, 2]


def test_callback_that_raises_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("in the callback")

    monkeypatch.setattr(ours.HopliteBackend, "batch_completed", broken)
    with pytest.raises(RuntimeError, match="in the callback"):
        Parallel(pre_dispatch=2, batch_size=1)(delayed(abs)(n) for n in range(20))
