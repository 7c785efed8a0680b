"""Large global arrays: sent when they have changed, read where the kernel says that they may have.

Each test runs twice: as the kernel allows, and as on one that cannot tell which pages were written.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp.client import written
from tests.tasks.helpers import PATIENCE_S, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hoplite_mp import Cluster
    from hoplite_mp.serial import Array

MIB = 1 << 20
WATCHES = written.available()
needs_watches = pytest.mark.skipif(not WATCHES, reason="the kernel does not tell, or must not")


@pytest.fixture(params=["watched", "read in full"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    if kind == "read in full":
        monkeypatch.setattr(written, "available", lambda: False)
    elif not WATCHES:
        pytest.skip("the kernel does not tell, or must not")
    return kind


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="512MiB") as made:
        yield made


def arrays_of(cluster: Cluster) -> Any:
    return cluster._runtime.submitter._functions._arrays


def scope_of(**values: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """A function and its globals; it gives a checksum of `x`."""
    scope = {"__name__": "a script", "np": np, **values}
    exec("def total(): return int(x.astype(np.int64).sum()), str(x.dtype), x.shape", scope)
    return scope, scope["total"]


def expected(x: Array) -> tuple[int, str, tuple[int, ...]]:
    return int(x.astype(np.int64).sum()), str(x.dtype), x.shape


def test_what_has_not_changed_is_neither_sent_nor_read(cluster: Cluster, kernel: str) -> None:
    scope, total = scope_of(x=np.arange(4 * MIB, dtype=np.int32))
    send, arrays = cluster._runtime.submitter._functions.send, arrays_of(cluster)
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
    assert cluster.submit(total).result(PATIENCE_S) == expected(scope["x"])


def test_the_same_bytes_are_stored_once(cluster: Cluster) -> None:
    one = np.arange(4 * MIB, dtype=np.int32)
    scope, total = scope_of(x=one)
    other, also = scope_of(x=one.copy())
    arrays = arrays_of(cluster)
    assert cluster.submit(total).result(PATIENCE_S) == expected(one)
    assert cluster.submit(also).result(PATIENCE_S) == expected(one)
    stored = arrays.copy_of(one)[0].ref
    assert arrays.copy_of(other["x"])[0].ref == stored
    for _ in range(3):
        scope["x"] = scope["x"].copy()
        assert cluster.submit(total).result(PATIENCE_S) == expected(one)
        assert arrays.copy_of(scope["x"])[0].ref == stored
    other["x"][0] += 1  # they were never one array
    assert cluster.submit(also).result(PATIENCE_S) == expected(other["x"])
    assert cluster.submit(total).result(PATIENCE_S) == expected(one)


def test_a_task_sees_its_arrays_as_they_were_at_its_call(cluster: Cluster) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = scope_of(x=x)
    futures = []
    for n in range(8):
        x[:: 1 << 17] = n
        x[-1] = -n
        futures.append((cluster.submit(total), expected(x)))
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
    _, total = scope_of(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    for place in (0, -1, x.shape[0] // 2, 0):
        x[place] += 1
        assert cluster.submit(total).result(PATIENCE_S) == expected(x), place
    assert cluster.submit(lambda: (type(x), x.flags.writeable)).result(PATIENCE_S) == (
        type(x),
        True,
    )


def test_what_the_store_keeps(cluster: Cluster) -> None:
    made = cluster.empty(MIB, np.int64)
    made[:] = 1
    scope, total = scope_of(x=made)
    assert cluster.submit(total).result(PATIENCE_S) == expected(made)
    made[7] = 7
    assert cluster.submit(total).result(PATIENCE_S) == expected(made)
    scope["x"] = cluster.get(cluster.put(np.full(MIB, 3, np.int64)))
    assert cluster.submit(total).result(PATIENCE_S) == expected(scope["x"])
    before = arrays_of(cluster).bytes_compared
    assert cluster.submit(total).result(PATIENCE_S) == expected(scope["x"])
    assert arrays_of(cluster).bytes_compared == before  # nobody can write to it
    frozen = np.arange(MIB)
    scope["x"] = frozen.view()
    scope["x"].flags.writeable = False
    assert cluster.submit(total).result(PATIENCE_S) == expected(frozen)
    frozen[5] = 0  # read-only is the view alone
    assert cluster.submit(total).result(PATIENCE_S) == expected(frozen)


def test_views_over_the_same_memory(cluster: Cluster) -> None:
    base = np.zeros(4 * MIB, np.int64)
    one, sum_one = scope_of(x=base[: 3 * MIB])
    two, sum_two = scope_of(x=base[MIB:])
    three, sum_three = scope_of(x=base)
    for place in (2 * MIB, 0, 4 * MIB - 1, 2 * MIB + 5, MIB):
        base[place] += place
        for _ in range(2):
            for scope, total in ((one, sum_one), (two, sum_two), (three, sum_three)):
                assert cluster.submit(total).result(PATIENCE_S) == expected(scope["x"])
    del two["x"]  # what watched a part is gone, the others see what is written there
    gc.collect()
    base[2 * MIB + 7] = 9
    for scope, total in ((one, sum_one), (three, sum_three)):
        assert cluster.submit(total).result(PATIENCE_S) == expected(scope["x"])


def test_names_of_one_array_stay_names_of_one(cluster: Cluster) -> None:
    x = np.zeros(MIB, np.int32)
    scope = {"np": np, "__name__": "a script", "x": x, "y": x, "z": x.copy()}
    exec("def f(): x[0] = 1; return int(y[0]), int(z[0]), x is y", scope)
    exec("def g(): return int(y[0]), int(z[0])", scope)
    assert cluster.submit(scope["f"]).result(PATIENCE_S) == (1, 0, True)
    assert cluster.submit(scope["g"]).result(PATIENCE_S) == (1, 0)


def test_memory_that_is_exchanged(cluster: Cluster) -> None:
    """The place of an array is taken by another one, or its pages by others."""
    x = np.ones(2 * MIB, np.int64)
    scope, total = scope_of(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    for n in (MIB, 2 * MIB, 2 * MIB + 513, 2 * MIB):
        x.resize(n, refcheck=False)  # moved, or cut, and filled with zeros
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    for n in range(6):  # the allocator gives the same place again
        scope["x"] = x = None
        scope["x"] = x = np.full(2 * MIB, n, np.int64)
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    memory = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    scope["x"] = x = np.frombuffer(memory, np.int64)
    x[:] = 1
    for advice in (mmap.MADV_DONTNEED, mmap.MADV_FREE):
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)
        memory.madvise(advice, 2 * MIB, 4 * MIB)  # zeros, without a write
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)
        x[:] = 2
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed, anonymous = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = x.ctypes.data
    assert libc.mmap(place, 4 * MIB, 3, fixed | anonymous, -1, 0) == place
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    x[3] = 4
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)


def test_huge_pages_locked_pages_and_merged_ones(cluster: Cluster) -> None:
    memory = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = np.frombuffer(memory, np.int64)
    _, total = scope_of(x=x)
    libc = ctypes.CDLL(None)
    collapse = 25
    steps: list[Callable[[], Any]] = [
        lambda: memory.madvise(mmap.MADV_HUGEPAGE),
        lambda: libc.madvise(ctypes.c_void_p(x.ctypes.data), 8 * MIB, collapse),
        lambda: libc.mlock(ctypes.c_void_p(x.ctypes.data), MIB),
        lambda: memory.madvise(mmap.MADV_MERGEABLE),
        lambda: memory.madvise(mmap.MADV_UNMERGEABLE),
        lambda: libc.munlock(ctypes.c_void_p(x.ctypes.data), MIB),
    ]
    for n, step in enumerate(steps):
        for _ in range(2):
            x[n * 1000] += 1
            assert cluster.submit(total).result(PATIENCE_S) == expected(x)
        with contextlib.suppress(OSError):  # this kernel has no such thing
            step()
        x[-1] += 1
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)


def test_a_fork_between_two_submits(cluster: Cluster) -> None:
    x = np.ones(MIB, np.int64)
    _, total = scope_of(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    child = subprocess.Popen(["true"], preexec_fn=lambda: None)
    pid = os.fork()
    if pid == 0:  # writes to its own pages; what it asks of the kernel is about its own, too
        x[:] = 5
        watch = written.Watch(x.ctypes.data, x.nbytes)
        with written.lock:
            watch.open()
            watch.look()
            watch.settle()
            x[MIB // 2] = 6
            found = watch.look()
        at = 8 * (MIB // 2)
        good = found is None or any(low <= at < high for low, high in found)
        os._exit(0 if good else 1)
    x[5] = 2
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    x[MIB // 2] = 3
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)


KERNEL_WRITES = """
import ctypes, mmap, os, socket, sys
import numpy as np
from hoplite_mp.client import written
if sys.argv[1] == "nobody":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # a process that changes its user is not to look at itself
assert written.available()
MIB = 1 << 20
x = np.zeros(4 * MIB, np.uint8)
watch = written.Watch(x.ctypes.data, x.nbytes)
watch.open()
assert watch.watched and watch.look() is None
watch.settle()
x.sum()
page = x.ctypes.data % 4096
def seen(low, high):
    found = watch.look()
    assert found is not None
    watch.settle()
    assert all(any(a <= at < b for a, b in found) for at in range(low, high, 500)), found
    assert sum(b - a for a, b in found) < MIB, found  # and not all of it is called written
    assert watch.look() == watch.look()
    watch.settle()
part = memoryview(x)[MIB : MIB + 100_000]
# readinto of a file
with open(sys.argv[2], "rb", buffering=0) as file:
    assert file.readinto(part) == 100_000
seen(MIB, MIB + 100_000)
# recv_into of a socket
a, b = socket.socketpair()
a.sendall(b"x" * 50_000)
assert b.recv_into(part, 50_000, socket.MSG_WAITALL) == 50_000
seen(MIB, MIB + 50_000)
# readv of a pipe
r, w = os.pipe()
os.write(w, b"y" * 30_000)
assert os.readv(r, [part]) == 30_000
seen(MIB, MIB + 30_000)
# O_DIRECT, where the file system has it: the kernel writes to pinned pages
start = -(-(x.ctypes.data + 2 * MIB) // 4096) * 4096 - x.ctypes.data
try:
    direct = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECT)
    got = os.preadv(direct, [memoryview(x)[start : start + 65536]], 0)
except OSError:
    got = 0
if got: seen(start, start + got)
# another process writes to this one's memory
pid = os.getpid()
class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(0x59616d61, ctypes.c_ulong(-1))
ready, go = os.pipe()
child = os.fork()
if not child:
    source = ctypes.create_string_buffer(b"z" * 9000, 9000)
    mine, theirs = iovec(ctypes.addressof(source), 9000), iovec(x.ctypes.data + 3 * MIB, 9000)
    n = libc.process_vm_writev(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    os._exit(0 if n == 9000 else ctypes.get_errno() or 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if status == 0:
    assert bytes(x[3 * MIB : 3 * MIB + 9000]) == b"z" * 9000
    seen(3 * MIB, 3 * MIB + 9000)
# memmove, and single bytes
ctypes.memmove(x.ctypes.data + 77_777, b"q" * 10, 10)
seen(77_777, 77_787)
for at in (0, 4 * MIB - 1):
    x[at] = 9
    seen(at, at + 1)
print("seen", bool(got), status)
"""


@needs_watches
@pytest.mark.parametrize("user", ["as it is", "nobody"])
def test_writes_by_the_kernel_work_and_are_seen(user: str, kernel: str, tmp_path: Path) -> None:
    if kernel != "watched" or (user == "nobody" and os.getuid() != 0):
        pytest.skip("once is enough, and only root can become somebody else")
    data = tmp_path / "data"
    data.write_bytes(os.urandom(200_000))
    place = tmp_path
    while place != place.parent:  # readable for whoever it becomes
        if place.owner() == data.owner() and not place.stat().st_mode & 0o1000:
            place.chmod(place.stat().st_mode | 0o055)
        place = place.parent
    data.chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_WRITES, user, str(data)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.startswith("seen"), done.stderr


def test_threads_that_submit_and_write_at_once(cluster: Cluster) -> None:
    """Whoever submits after a write sees it, whoever looks at the pages meanwhile."""
    x = np.zeros(MIB, np.int64)
    _, total = scope_of(x=x)
    stop = threading.Event()
    wrong: list[Any] = []

    def submit() -> None:
        while not stop.is_set():
            low = int(x[MIB // 2])
            value = cluster.submit(total).result(PATIENCE_S)[0]
            high = int(x[MIB // 2])
            if not low <= value <= high:
                wrong.append((low, value, high))

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(1, 40):
        x[MIB // 2] = n
        cluster.submit(total).result(PATIENCE_S)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_interrupt_in_the_middle_forgets_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = scope_of(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected(x)
    for name in ("same", "look"):
        real = getattr(written._pages, name)

        def interrupted(*args: Any, real: Any = real) -> Any:
            real(*args)
            raise KeyboardInterrupt

        x[7] += 1
        with monkeypatch.context() as patch:
            patch.setattr(written._pages, name, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                cluster.submit(total)
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)


def test_a_map_reads_once(cluster: Cluster, kernel: str) -> None:
    x = np.ones(4 * MIB, np.int8)
    scope: dict[str, Any] = {"x": x, "__name__": "a script"}
    exec("def at(i): return int(x[i])", scope)
    arrays = arrays_of(cluster)
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
        scope, total = scope_of(x=x)
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)
        gone = weakref.ref(x)
        del x, scope, total
        gc.collect()
        assert gone() is None
    _, total = scope_of(x=np.zeros(2 * MIB, np.int8))
    cluster.submit(total).result(PATIENCE_S)
    assert len(arrays_of(cluster)._kept) <= 2  # this one, and what the last test has left
    assert cluster.stats()["bytes_used"] - before < 24 * MIB


def test_what_is_always_rewritten_is_not_watched(cluster: Cluster, kernel: str) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = scope_of(x=x)
    arrays = arrays_of(cluster)

    def watched() -> bool:
        return bool(arrays._kept[id(x)].watch.watched)

    states = []
    for n in range(1, 14):
        if n < 8:
            x[:] = n
        assert cluster.submit(total).result(PATIENCE_S) == expected(x)
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


def test_a_script_that_is_run_with_errors_for_warnings() -> None:
    out = run(
        """
        import warnings; warnings.simplefilter("error")
        big = np.ones(10_000_000)
        def f(i): return big[i]
        with hoplite_mp.Executor(2) as ex:
            say(ex.submit(f, 3).result(), sum(ex.map(f, range(16))))
            big[3] = 2
            say(ex.submit(f, 3).result())
        """
    )
    assert out.split() == ["1.0", "16.0", "2.0"]


# -- a program of chance ----------------------------------------------------------------------

SIZE = 3 * MIB // 2


class Machine:
    """Arrays under names, and everything that may happen to them between two submits."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        self.cluster = cluster
        self.path = path
        self.scope: dict[str, Any] = {"np": np, "__name__": "chance"}
        self.scope |= {"x": np.zeros(SIZE, np.uint8), "y": np.ones(SIZE, np.uint8)}
        exec("def one(): return int(x.sum(dtype=np.int64))", self.scope)
        exec("def two(): return one(), int(y.sum(dtype=np.int64))", self.scope)

    def step(self, what: str, name: str, at: int, n: int) -> None:
        array = self.scope[name]
        at = min(at, len(array) - 1)
        length = min(n * 977, len(array) - at)
        if what == "index":
            array[at] = n
        elif what == "slice":
            array[at : at + length] += 1
        elif what == "ufunc":
            np.add(array, n, out=array, casting="unsafe")
        elif what == "read" and length:
            with open(self.path, "rb", buffering=0) as file:
                file.readinto(memoryview(array)[at : at + length])
        elif what == "receive" and length:
            a, b = socket.socketpair()
            with a, b:
                a.sendall(bytes([n]) * min(length, 60_000))
                b.recv_into(memoryview(array)[at : at + length])
        elif what == "memmove":
            ctypes.memmove(array.ctypes.data + at, bytes([n]) * length, length)
        elif what == "swap":
            self.scope["x"], self.scope["y"] = self.scope["y"], self.scope["x"]
        elif what == "alias":
            self.scope["x"] = self.scope["y"] = array
        elif what == "view":
            self.scope[name] = array[: max(MIB + 1, len(array) - at)]
        elif what == "resize" and array.base is None:
            array.resize(SIZE + 4096 * (n % 3), refcheck=False)
        elif what == "new":
            del array
            self.scope[name] = None
            self.scope[name] = np.full(SIZE, n % 4, np.uint8)
        elif what == "copy":
            self.scope[name] = array.copy()

    def check(self) -> None:
        values = [int(self.scope[name].sum(dtype=np.int64)) for name in "xy"]
        assert self.cluster.submit(self.scope["one"]).result(PATIENCE_S) == values[0]
        assert list(self.cluster.submit(self.scope["two"]).result(PATIENCE_S)) == values


STEPS = ("index", "slice", "ufunc", "read", "receive", "memmove", "swap", "alias", "view")
STEPS += ("resize", "new", "copy", "index", "slice")


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(STEPS),
                st.sampled_from("xy"),
                st.integers(0, SIZE - 1),
                st.integers(0, 200),
            ),
            max_size=3,
        ),
        min_size=3,
        max_size=8,
    )
)
def test_programs_of_chance(
    cluster: Cluster, kernel: str, program: list[list[tuple[str, str, int, int]]]
) -> None:
    machine = Machine(cluster, sys.executable)
    machine.check()
    for steps in program:
        for step in steps:
            machine.step(*step)
        machine.check()


def test_a_closed_cluster_watches_nothing(kernel: str) -> None:
    x = np.zeros(MIB, np.int64)
    _, total = scope_of(x=x)
    before = len(written._state.watches)
    with hoplite_mp.Cluster(workers=1) as one, hoplite_mp.Cluster(workers=1) as other:
        for n in range(4):
            x[n * 1000] = 1
            assert one.submit(total).result(PATIENCE_S) == expected(x)
            assert other.submit(total).result(PATIENCE_S) == expected(x)
            x[n * 2000] = 2
            assert other.submit(total).result(PATIENCE_S) == expected(x)
            assert one.submit(total).result(PATIENCE_S) == expected(x)
        assert len(written._state.watches) == before + (2 if kernel == "watched" else 0)
    assert len(written._state.watches) == before


def test_scripts_whose_workers_change_their_globals() -> None:
    """As with small ones: what a task has set stays until the submitter changes it."""
    out = run(
        textwrap.dedent(
            """
            grid = np.zeros(300_000)
            def plus(): grid[0] += 1; return int(grid[0])
            def look(): return int(grid[0]), int(grid[1])
            with hoplite_mp.Cluster(1) as c:
                say([c.submit(plus).result() for _ in range(3)], c.submit(look).result())
                grid[1] = 5
                say(c.submit(look).result(), c.submit(plus).result(), c.submit(look).result())
                grid = grid.copy()
                say(c.submit(look).result(), c.map(plus, range(0)) and "")
            """
        )
    )
    assert out.splitlines() == ["[1, 2, 3] (3, 0)", "(0, 5) 1 (1, 5)", "(1, 5) "]
