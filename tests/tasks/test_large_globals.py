"""Large global arrays: sent when they have changed, and then alone.

Each test runs twice: as the kernel allows, and as on one that cannot tell which pages were written.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._client import captured_arrays as captured
from tests.support.functions import captured_arrays, expected_total, function_with_globals
from tests.support.values import MIB
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster
    from hoplite_mp._serialize import Array

WORKERS, MEMORY = 1, "512MiB"
pytestmark = pytest.mark.usefixtures("kernel")


def test_what_has_not_changed_is_neither_sent_nor_read(cluster: Cluster, kernel: str) -> None:
    scope, total = function_with_globals(x=np.arange(4 * MIB, dtype=np.int32))
    send, arrays = cluster._runtime.submitter._functions.send, captured_arrays(cluster)
    first = send(total)[0]
    before = arrays.bytes_compared
    assert all(send(total)[0] == first for _ in range(10))
    compared = arrays.bytes_compared - before
    if kernel == "watched":
        assert compared <= 10 * 2 * mmap.PAGESIZE  # the edges
    else:
        assert compared == 10 * scope["x"].nbytes
    before, scope["x"][1234567] = arrays.bytes_compared, 5
    second = send(total)[0]
    assert second != first
    scope["x"][2345678] = scope["x"][2345678]  # written, and as it was
    assert send(total)[0] == second
    if kernel == "watched":
        # Another array of this size is looked for, and found at the first difference.
        assert arrays.bytes_compared - before < 8 * mmap.PAGESIZE + 2 * scope["x"].nbytes
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(scope["x"])


def test_the_same_bytes_are_stored_once(cluster: Cluster) -> None:
    one = np.arange(4 * MIB, dtype=np.int32)
    scope, total = function_with_globals(x=one)
    other, also = function_with_globals(x=one.copy())
    arrays = captured_arrays(cluster)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(one)
    assert cluster.submit(also).result(PATIENCE_S) == expected_total(one)
    stored = arrays.copy_of(one)[0].ref
    assert arrays.copy_of(other["x"])[0].ref == stored
    for _ in range(3):
        scope["x"] = scope["x"].copy()
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(one)
        assert arrays.copy_of(scope["x"])[0].ref == stored
    other["x"][0] += 1  # they were never one array
    assert cluster.submit(also).result(PATIENCE_S) == expected_total(other["x"])
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(one)


def test_a_task_sees_its_arrays_as_they_were_at_its_call(cluster: Cluster) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = function_with_globals(x=x)
    futures = []
    for n in range(8):
        x[:: 1 << 17] = n
        x[-1] = -n
        futures.append((cluster.submit(total), expected_total(x)))
    assert [f.result(PATIENCE_S) for f, _ in futures] == [value for _, value in futures]


def kinds() -> dict[str, Callable[[], Array]]:
    base = np.arange(2 * MIB, dtype=np.int64)
    return {
        "plain": lambda: base.copy(),
        "odd place": lambda: base.copy().view(np.uint8)[3 : 9 * MIB + 5],
        "strided": lambda: base.copy()[::3],
        "transposed": lambda: base.copy().reshape(1024, -1).T,
        "subclass": lambda: base.copy().reshape(1024, -1).view(np.recarray),
        "records": lambda: base.copy().view([("a", "i4"), ("b", "f4")])["a"],
        "zeros": lambda: np.zeros(4 * MIB, np.int16),
        "shared mapping": lambda: np.frombuffer(mmap.mmap(-1, 8 * MIB), np.int32),
        "private mapping": lambda: np.frombuffer(
            mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.int32
        ),
        "bytearray": lambda: np.frombuffer(bytearray(3 * MIB), np.uint8),
        "one page and a bit": lambda: np.ones(MIB + 5000, np.int8),
    }


@pytest.mark.parametrize("kind", kinds())
def test_arrays_of_every_kind(cluster: Cluster, kind: str) -> None:
    x = kinds()[kind]()
    _, total = function_with_globals(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    for place in (0, -1, x.shape[0] // 2, 0):
        x[place] += 1
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x), place
    assert cluster.submit(lambda: (type(x), x.flags.writeable)).result(PATIENCE_S) == (
        type(x),
        True,
    )


def test_what_the_store_keeps(cluster: Cluster) -> None:
    made = cluster.empty(MIB, np.int64)
    made[:] = 1
    scope, total = function_with_globals(x=made)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(made)
    made[7] = 7
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(made)
    scope["x"] = cluster.get(cluster.put(np.full(MIB, 3, np.int64)))
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(scope["x"])
    before = captured_arrays(cluster).bytes_compared
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(scope["x"])
    assert captured_arrays(cluster).bytes_compared == before  # nobody can write to it
    frozen = np.arange(MIB)
    scope["x"] = frozen.view()
    scope["x"].flags.writeable = False
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(frozen)
    frozen[5] = 0  # read-only is the view alone
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(frozen)


def test_names_of_one_array_stay_names_of_one(cluster: Cluster) -> None:
    x = np.zeros(MIB, np.int32)
    scope = {"np": np, "__name__": "a script", "x": x, "y": x, "z": x.copy()}
    exec("def f(): x[0] = 1; return int(y[0]), int(z[0]), x is y", scope)
    exec("def g(): return int(y[0]), int(z[0])", scope)
    assert cluster.submit(scope["f"]).result(PATIENCE_S) == (1, 0, True)
    assert cluster.submit(scope["g"]).result(PATIENCE_S) == (1, 0)


def test_a_map_reads_once(cluster: Cluster, kernel: str) -> None:
    x = np.ones(4 * MIB, np.int8)
    scope: dict[str, Any] = {"x": x, "__name__": "a script"}
    exec("def at(i): return int(x[i])", scope)
    arrays = captured_arrays(cluster)
    for count, chunksize in ((16, 1), (64, 4)):
        assert list(cluster.map(scope["at"], range(count), chunksize=chunksize)) == [1] * count
        before = arrays.bytes_compared
        assert sum(cluster.map(scope["at"], range(count), chunksize=chunksize)) == count
        assert arrays.bytes_compared - before <= x.nbytes
    x[:] = 2
    assert list(cluster.map(scope["at"], range(16), chunksize=2)) == [2] * 16
    assert [f.result(PATIENCE_S) for f in (cluster.submit(scope["at"], 1),)] == [2]


def test_inside_containers_closures_and_arguments(cluster: Cluster) -> None:
    x = np.ones(MIB, np.int64)
    held = {"x": [x]}
    scope: dict[str, Any] = {"held": held, "x": x, "np": np, "__name__": "a script"}
    exec("def inside(): return int(held['x'][0].sum())", scope)
    exec("def outside(y=x): return int(x.sum() + y.sum())", scope)

    def closes() -> int:
        return int(x.sum())

    def call(function: Callable[[], Any]) -> Any:
        return function()

    for n in range(3):
        x[n] = 10 * n
        total = int(x.sum())
        assert cluster.submit(scope["inside"]).result(PATIENCE_S) == total
        assert cluster.submit(scope["outside"]).result(PATIENCE_S) == 2 * total
        assert cluster.submit(closes).result(PATIENCE_S) == total
        assert cluster.submit(call, scope["outside"]).result(PATIENCE_S) == 2 * total


def test_an_array_that_is_gone_leaves_nothing(cluster: Cluster, kernel: str) -> None:
    before = cluster.stats()["bytes_used"]
    for n in range(4):
        x = np.full(8 * MIB, n, np.int8)
        scope, total = function_with_globals(x=x)
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
        gone = weakref.ref(x)
        del x, scope, total
        gc.collect()
        assert gone() is None
    _, total = function_with_globals(x=np.zeros(2 * MIB, np.int8))
    cluster.submit(total).result(PATIENCE_S)
    assert len(captured_arrays(cluster)._kept) <= 2  # this one, and what the last test has left
    eventually(lambda: cluster.stats()["bytes_used"] - before < 24 * MIB)


def test_what_is_always_rewritten_is_not_watched(cluster: Cluster, kernel: str) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = function_with_globals(x=x)
    arrays = captured_arrays(cluster)

    def watched() -> bool:
        return bool(arrays._kept[id(x)].watch.watched)

    states = []
    for n in range(1, 14):
        if n < 8:
            x[:] = n
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
        states.append(watched())
    if kernel == "watched":
        assert (states[0], states[6], states[-1]) == (True, False, True)
    else:
        assert not any(states)


def test_the_warning_names_it_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    scope: dict[str, Any] = {"weights": np.ones(2 * MIB, np.int8), "__name__": os.urandom(4).hex()}
    exec("def f(): return len(weights)\ndef g(): return weights[0]", scope)
    with caplog.at_level(logging.WARNING, "hoplite_mp"):
        for name in "ffg":
            cluster.submit(scope[name]).result(PATIENCE_S)
            scope["weights"][0] += 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert all(word in said[0] for word in ("weights", "2 MiB", "c.put(weights)"))


def test_a_closed_cluster_watches_nothing(kernel: str) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = function_with_globals(x=x)
    before = len(captured._state.watches)
    with hoplite_mp.Cluster(workers=1) as one, hoplite_mp.Cluster(workers=1) as other:
        for n in range(4):
            x[n * 1000] = 1
            assert one.submit(total).result(PATIENCE_S) == expected_total(x)
            assert other.submit(total).result(PATIENCE_S) == expected_total(x)
            x[n * 2000] = 2
            assert other.submit(total).result(PATIENCE_S) == expected_total(x)
            assert one.submit(total).result(PATIENCE_S) == expected_total(x)
        assert len(captured._state.watches) == before + (2 if kernel == "watched" else 0)
    assert len(captured._state.watches) == before


def test_array_of_a_module_that_is_bound_anew_leaves_no_copies(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("a_module_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("total, other = lambda: int(x.sum()), lambda: x", module.__dict__)
    arrays = captured_arrays(cluster)
    for n in range(4):
        module.x = np.full(MIB, n, np.int64)  # type: ignore[attr-defined]
        assert cluster.submit(module.total).result(PATIENCE_S) == n * MIB
        assert len(arrays._bound) == 1
    module.x = 5  # type: ignore[attr-defined]
    assert cluster.submit(module.other).result(PATIENCE_S) == 5
    assert not arrays._bound
