"""What is written to a large global array is seen, however it is written, and wherever it lies.

Each test runs twice: as the kernel allows, and as on one that cannot tell which pages were written.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoplite_mp._client import captured_arrays
from tests.support.functions import WATCHES, expected_total, function_with_globals
from tests.support.values import MIB
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster


WORKERS, MEMORY = 1, "512MiB"
pytestmark = pytest.mark.usefixtures("kernel")

needs_watches = pytest.mark.skipif(not WATCHES, reason="the kernel does not tell, or must not")


def test_views_over_the_same_memory(cluster: Cluster) -> None:
    base = np.zeros(4 * MIB, np.int64)
    one, sum_one = function_with_globals(x=base[: 3 * MIB])
    two, sum_two = function_with_globals(x=base[MIB:])
    three, sum_three = function_with_globals(x=base)
    for place in (2 * MIB, 0, 4 * MIB - 1, 2 * MIB + 5, MIB):
        base[place] += place
        for _ in range(2):
            for scope, total in ((one, sum_one), (two, sum_two), (three, sum_three)):
                assert cluster.submit(total).result(PATIENCE_S) == expected_total(scope["x"])
    del two["x"]  # what watched a part is gone, the others see what is written there
    gc.collect()
    base[2 * MIB + 7] = 9
    for scope, total in ((one, sum_one), (three, sum_three)):
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(scope["x"])


@needs_watches
def test_writes_found_by_one_watch_are_unknown_to_another(kernel: str) -> None:
    memory = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # huge pages are written as a whole
    base = np.frombuffer(memory, np.int64)
    base[:] = 1
    address = base.__array_interface__["data"][0]
    one, other, beside = watches = (
        captured_arrays.WriteWatch(address, base.nbytes),
        captured_arrays.WriteWatch(address + 16 * MIB, 8 * MIB),
        captured_arrays.WriteWatch(address, 8 * MIB),
    )
    known = kernel == "watched"
    with captured_arrays.lock:
        for watch in watches:
            watch.open()
            watch.look()
            watch.settle()
        assert (one.look() is not None) == known
        one.settle()
        assert (other.look() is not None) == known  # nothing was written
        other.settle()
        base[-12 * MIB // 8] = 2
        assert (other.look() is not None) == known
        assert other.look() is None  # not settled yet
        other.settle()
        assert (other.look() is not None) == known
        assert one.look() is None  # anything: nothing of it is forgotten
        assert (beside.look() is None) == (not known)
        for watch in watches:
            watch.close()


def test_memory_that_is_exchanged(cluster: Cluster) -> None:
    """The place of an array is taken by another one, or its pages by others."""
    x = np.ones(2 * MIB, np.int64)
    scope, total = function_with_globals(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    for n in (MIB, 2 * MIB, 2 * MIB + 513, 2 * MIB):
        x.resize(n, refcheck=False)  # moved, or cut, and filled with zeros
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    for n in range(6):  # the allocator gives the same place again
        scope["x"] = x = None
        scope["x"] = x = np.full(2 * MIB, n, np.int64)
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    memory = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    scope["x"] = x = np.frombuffer(memory, np.int64)
    x[:] = 1
    for advice in (mmap.MADV_DONTNEED, mmap.MADV_FREE):
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
        memory.madvise(advice, 2 * MIB, 4 * MIB)  # zeros, without a write
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
        x[:] = 2
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed, anonymous = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = x.ctypes.data
    assert libc.mmap(place, 4 * MIB, 3, fixed | anonymous, -1, 0) == place
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    x[3] = 4
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)


def test_huge_pages_locked_pages_and_merged_ones(cluster: Cluster) -> None:
    memory = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = np.frombuffer(memory, np.int64)
    _, total = function_with_globals(x=x)
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
            assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
        with contextlib.suppress(OSError):  # this kernel has no such thing
            step()
        x[-1] += 1
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)


def test_a_fork_between_two_submits(cluster: Cluster) -> None:
    x = np.ones(MIB, np.int64)
    _, total = function_with_globals(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    pid = os.fork()
    if pid == 0:  # writes to its own pages; what it asks of the kernel is about its own, too
        x[:] = 5
        watch = captured_arrays.WriteWatch(x.ctypes.data, x.nbytes)
        with captured_arrays.lock:
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
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    x[MIB // 2] = 3
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)


KERNEL_WRITES = """
import ctypes, mmap, os, socket, sys
import numpy as np
from hoplite_mp._client import captured_arrays as written
if sys.argv[1] == "nobody":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # a process that changes its user is not to look at itself
assert written.available()
MIB = 1 << 20
x = np.zeros(4 * MIB, np.uint8)
watch = written.WriteWatch(x.ctypes.data, x.nbytes)
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
    assert watch.look() is not None and watch.look() is None
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
    _, total = function_with_globals(x=x)
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
    _, total = function_with_globals(x=x)
    assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)
    for name in ("same", "look"):
        real = getattr(captured_arrays._pages, name)

        def interrupted(*args: Any, real: Any = real) -> Any:
            real(*args)
            raise KeyboardInterrupt

        x[7] += 1
        with monkeypatch.context() as patch:
            patch.setattr(captured_arrays._pages, name, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                cluster.submit(total)
        assert cluster.submit(total).result(PATIENCE_S) == expected_total(x)


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
        elif what == "resize" and array.base is None and not self._is_viewed(array):
            array.resize(SIZE + 4096 * (n % 3), refcheck=False)
        elif what == "new":
            del array
            self.scope[name] = None
            self.scope[name] = np.full(SIZE, n % 4, np.uint8)
        elif what == "copy":
            self.scope[name] = array.copy()

    def _is_viewed(self, array: Any) -> bool:
        """Is another one a view of it? That would stand on memory that resize has given back."""
        return any(self.scope[name].base is array for name in "xy")

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
