"""What holds after every test: no process and no shared-memory name stays behind, and no thread of
any process took locks in a wrong order (hoplite_mp/_common/lockdep.py).

The check after each test looks at direct children only and costs microseconds when there are
none. Orphans, whose parent died before them, show up at the end of the session: every process
that a test starts inherits a marker in its environment.

Names in /dev/shm are judged in a mount of this process's own, where only it and its children can
make any: other programs of the machine are not blamed, nor other workers of this run. Where the
kernel does not permit that (no CAP_SYS_ADMIN), a name counts if a process of this run holds it
open or mapped; what such a process has left behind at its death is then not seen, and the header
of the run says so.
"""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# Before the library is imported. Every process that a test starts inherits the variable, and writes
# what it finds into this directory. HOPLITE_MP_DEBUG_LOCKS=0 switches the checks off.
LOCKS = "HOPLITE_MP_DEBUG_LOCKS"
FOUND = ""
if os.environ.get(LOCKS) != "0":
    FOUND = os.environ[LOCKS] = tempfile.mkdtemp(prefix="hoplite_mp-locks-")
    atexit.register(lambda pid: pid == os.getpid() and shutil.rmtree(FOUND), os.getpid())

from tests.lan import forked  # noqa: E402

MARKER = f"PYTEST_SESSION_MARKER={uuid.uuid4().hex}"
LOKY = ("sem.loky-", "loky-", "joblib_memmapping_folder_")
GRACE_S = 30.0  # nobody waits for it unless something stays behind
SHM = "/dev/shm"
CLONE_NEWNS = 0x00020000
MS_REC, MS_SLAVE = 0x4000, 0x80000  # mounts of the machine still come in, ours do not go out
# The standard library starts it once, for all who use its semaphores; it ends with pytest.
EXEMPT = "multiprocessing.resource_tracker"


def _private_shm() -> str:
    """Gives this process, and whom it starts, a /dev/shm of its own. Returns why not, or ""."""
    if not os.path.isdir(SHM):
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None),
        lambda: libc.mount(b"tmpfs", SHM.encode(), b"tmpfs", 0, b"mode=1777"),
    )
    for step in steps:
        if step():
            return os.strerror(ctypes.get_errno())
    assert not os.listdir(SHM)
    return ""


# The level of each folder or file of tests; the longest path counts. The others start a cluster.
LEVELS = {
    # No process is started.
    "unit": (
        "docs/test_applications_page.py", "docs/test_docstrings.py", "fuzz", "model", "planner",
        "protocol", "serial", "store/test_limits.py", "sync/test_tables.py", "tasks/test_chunks.py",
        "test_architecture.py", "test_config.py", "test_errors.py", "test_function_length.py",
        "test_ids.py", "test_module_names.py", "test_node_packages.py", "test_public_api.py",
        "test_ratchets.py", "test_support.py", "test_vocabulary.py",
    ),
    # Parts of a node, compiled modules and simulated hosts in this process, or with a child.
    "component": (
        "cext", "collectives/test_member_interrupted.py", "fuzz/test_coverage_guided.py", "node",
        "serial/test_main.py", "serial/test_captured_globals.py", "serial/test_open_files.py",
        "simulation", "store/test_arena.py", "tasks/test_line_to_node.py", "tasks/test_taking.py",
        "transport",
    ),
    # Several emulated hosts.
    "lan": (
        "campaign/test_hosts.py", "chaos/test_lan.py", "chaos/test_take_over.py",
        "engines/test_dask_hosts.py", "engines/test_ray_hosts.py", "engines/test_torch_lan.py",
        "lan", "ml/test_estimators_lost_hosts.py", "wire",
    ),
}  # fmt: skip
# Marked slow: the files that take most of the time of units and components, by `--durations`.
SLOW = (
    "model/test_scenarios.py", "model/test_engine_calls.py", "node/test_group_world.py",
    "simulation/test_aimed.py", "simulation/test_cluster.py", "simulation/test_latecomers.py",
    "simulation/test_bounded_groups.py", "simulation/test_learning.py",
    "simulation/test_peer_loss_order.py", "simulation/test_timed_groups.py",
    "simulation/test_packed.py", "simulation/test_scale.py", "simulation/test_slow_hosts.py",
)  # fmt: skip
LEVEL_OF = {path: level for level, paths in LEVELS.items() for path in paths}


def level_of(path: Path) -> str:
    """The marker of the tests in that file."""
    here = Path(__file__).parent
    if not path.is_relative_to(here):
        return "system"
    relative = path.relative_to(here)
    found = (LEVEL_OF.get(str(one)) for one in (relative, *relative.parents))
    return next((level for level in found if level), "system")


# When this file is read, in pytest's process and in each worker of its own: before any test, and in
# the main thread, whose mounts its threads and children inherit.
SHARED_BECAUSE = _private_shm()


# A shell ignores SIGINT for what it starts in the background, and so would every program that a
# test starts in order to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# An example that had no processor for a while is no slow one: what hangs is found by the timeout.
# Each `settings` of a test begins with this profile.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


# Until all tests are collected: what that makes stays, and looking for garbage in it takes half of
# the time.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks each test by its level, before tests are selected by marker.

    Files of few tests come first: those are the ones that take long. Processes that share the
    files out (`--dist loadfile --no-loadscope-reorder`) then end at about the same time.
    """
    slow = {Path(__file__).parent / path for path in SLOW}
    for item in items:
        item.add_marker(level_of(item.path))
        if item.path in slow:
            item.add_marker("slow")
    yield
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path])


def pytest_collection_finish() -> None:
    """Thousands of tests are no garbage: `gc.collect()`, which many of them call, passes over what
    was there before the first one."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--execute",
        action="store_true",
        help="supervisors and programs on emulated hosts are executed, as for users",
    )


def pytest_report_header() -> str:
    if not SHARED_BECAUSE:
        return "/dev/shm: private to this run"
    return (
        f"/dev/shm: shared with other programs ({SHARED_BECAUSE}): only names that living "
        "processes of this run hold are judged"
    )


@pytest.fixture(autouse=True, scope="session")
def supervisors_of_a_template(no_orphans: None, pytestconfig: pytest.Config) -> Iterator[None]:
    """Supervisors are forked from a process that has imported everything (tests/prefork.py)."""
    if pytestconfig.getoption("execute") or os.uname().machine not in ("x86_64", "aarch64"):
        yield
        return
    from tests.prefork import preforked

    with preforked(), forked.programs():
        yield


@pytest.fixture(scope="module")
def as_users_start_them() -> Iterator[None]:
    """No program of the tests of a file is a fork: they are about what programs start and how they
    end. With a standby, forks are also too quick: one cannot take over before each host has heard
    that it is one of the cluster, half a second after that."""
    with forked.executed():
        yield


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Fails the test that leaves a child process or an entry in /dev/shm."""
    children, names = _children(), _shared_names()
    yield
    if left := _settled(lambda: _described(_children() - children)):
        pytest.fail("child processes stayed behind: " + "; ".join(sorted(left)))
    if new := _settled(lambda: _judged(_shared_names() - names)):
        pytest.fail(f"entries in /dev/shm stayed behind: {sorted(new)}")


@pytest.fixture(autouse=True)
def locks_in_order() -> Iterator[None]:
    """Fails the test in which a thread of any process took locks in a wrong order."""
    yield
    if FOUND and os.listdir(FOUND):
        findings = sorted(Path(FOUND).iterdir())
        text = "\n".join(one.read_text() for one in findings)
        for one in findings:
            one.unlink()
        pytest.fail(text)


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
    """Without those of loky: the load that tests/steady.py runs beside is killed while it works."""
    found = os.listdir(SHM) if os.path.isdir(SHM) else []
    return {name for name in found if not name.startswith(LOKY)}


def _judged(names: set[str]) -> set[str]:
    """Those that processes of this run have made, as far as that can be known."""
    if not SHARED_BECAUSE or not names:
        return names
    held: set[str] = set()
    for pid in _marked() | {os.getpid()}:
        held |= _held_by(pid)
    return {name for name in names if f"{SHM}/{name}" in held}


def _held_by(pid: int) -> set[str]:
    """Paths in /dev/shm that a process has open or mapped, and the folders of its own in there."""
    found: set[str] = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found.add(line.partition("/")[1] + line.partition("/")[2])
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.add(os.readlink(link))
    except OSError:  # it has ended, or closed that one, meanwhile
        pass
    return {"/".join(path.split("/")[:4]) for path in found if path.startswith(f"{SHM}/")}


def _described(pids: set[int]) -> set[str]:
    """The processes in words, without those that are gone or exempt."""
    words = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline()) or process.name()
            if EXEMPT not in command and pid != forked.own_pid():
                words.add(f"{pid} ({process.status()}) {command}")
        except psutil.NoSuchProcess:
            continue
    return words
