"""What holds after every test: no process and no shared-memory name stays behind.

The check after each test looks at direct children only and costs microseconds when there are
none. Orphans, whose parent died before them, show up at the end of the session: every process
that a test starts inherits a marker in its environment.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

MARKER = f"PYTEST_SESSION_MARKER={uuid.uuid4().hex}"
GRACE_S = 5.0
FOREIGN = ("sem.mp-", "sem.loky-")
# The standard library starts it once, for all who use its semaphores; it ends with pytest.
EXEMPT = "multiprocessing.resource_tracker"


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Fails the test that leaves a child process or an entry in /dev/shm."""
    children, names = _children(), _shared_names()
    yield
    if left := _settled(lambda: _described(_children() - children)):
        pytest.fail("child processes stayed behind: " + "; ".join(sorted(left)))
    if new := _settled(lambda: _shared_names() - names):
        pytest.fail(f"entries in /dev/shm stayed behind: {sorted(new)}")


@pytest.fixture(autouse=True, scope="session")
def no_orphans() -> Iterator[None]:
    """Fails the session that leaves a process whose parent is gone."""
    name, value = MARKER.split("=")
    os.environ[name] = value
    yield
    del os.environ[name]
    if left := _settled(lambda: _described(_marked())):
        pytest.fail("orphans stayed behind: " + "; ".join(sorted(left)))


def _settled(look: Callable[[], set[str]]) -> set[str]:
    """What `look` still finds after at most GRACE_S; an ending process needs a moment."""
    end = time.monotonic() + GRACE_S
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _children() -> set[int]:
    """The direct children of this process, from the kernel's own list."""
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread ended in between, or a kernel without these lists
        lists = []
    if not lists:
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for text in lists for pid in text.split()}


def _marked() -> set[int]:
    """Every other process that carries the marker."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if MARKER.encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:  # another user's, or just gone
            continue
    return found - {os.getpid()}


def _shared_names() -> set[str]:
    """Without semaphores of the pools that other tests, in another process, compare with."""
    if not os.path.isdir("/dev/shm"):
        return set()
    return {name for name in os.listdir("/dev/shm") if not name.startswith(FOREIGN)}


def _described(pids: set[int]) -> set[str]:
    """The processes in words, without those that are gone or exempt."""
    words = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline()) or process.name()
            if EXEMPT not in command:
                words.add(f"{pid} ({process.status()}) {command}")
        except psutil.NoSuchProcess:
            continue
    return words
