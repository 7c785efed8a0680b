"""A host that has no descriptors, or no process, left: what needs one waits or says so, the rest
goes on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp._node.manager_link.connection import MANAGER_ABSENT_S
from hoplite_mp._protocol.local import LanStart, StartStandby
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._supervisor import manager_process
from hoplite_mp._supervisor.main import Supervisor
from hoplite_mp.config import Config
from tests.prefork import preforked
from tests.support.functions import add
from tests.support.node_harness import start_message
from tests.support.processes import at_rest, host_of
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 600.0  # no test takes so long, however busy the machine is
# Who waits for a start of the manager: its supervisor, and the node.
WAITS = (
    "hoplite_mp._supervisor.manager_process.PATIENCE_S",
    "hoplite_mp._node.manager_link.connection.MANAGER_ABSENT_S",
)
LAN = LanStart(
    key=Secret(b"k"),
    host_id=5,
    host="h",
    peer_fd=-1,
    addresses=["10.0.0.5:1"],
    ports=(1, 2, 1),
    handshake_timeout_s=1.0,
    pending_handshakes_max=1,
    connect_timeout_s=1.0,
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.5,
    tls=False,
)
PROCESSES_MAX = 40  # of a user of these tests; a cluster has less
PR_CAPBSET_DROP, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 24, 21, 24


def start_sleeper() -> int:
    """A process that a task leaves behind."""
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")


def sleep_for_long() -> None:
    time.sleep(LONG_S)


def node_of(cluster: hoplite_mp.Cluster) -> psutil.Process:
    return child_of(cluster, "node")


def child_of(cluster: hoplite_mp.Cluster, name: str) -> psutil.Process:
    family = host_of(cluster).children()
    (found,) = [one for one in family if one.name() == f"hoplite {name}"]
    return found


def tasks_of(user: int) -> int:
    """How many processes the kernel counts for that user: each thread is one, and so is what is
    left of a process that has ended until its parent has asked for its status."""
    found = 0
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            if one.uids().real == user:
                found += len(os.listdir(f"/proc/{one.pid}/task"))
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def is_only_a_status(one: psutil.Process) -> bool:
    return one.status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{one.pid}/task")) == 1


@contextlib.contextmanager
def starved(process: psutil.Process) -> Iterator[None]:
    """It can open nothing more."""
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    there = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = next(number for number in range(hard) if number not in there)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_the_node_has_no_descriptors(capfd: pytest.CaptureFixture[str]) -> None:
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster:
        at_rest(cluster, 2)
        with starved(node_of(cluster)):
            with pytest.raises(ValueError, match="no worker can be started: Too many open files"):
                cluster.add_workers(2)
            with pytest.raises(ValueError, match="no worker can be started: Too many open files"):
                cluster.executor(2)
            parts = [cluster.submit(np.full, 300_000, float(i)) for i in range(3)]
            assert cluster.get(cluster.reduce(parts))[5] == 3.0
            assert cluster.nodes[0].workers == 2

        def grows() -> bool:
            try:
                cluster.add_workers(1)
            except ValueError:
                return False
            return True

        eventually(grows)
        eventually(lambda: cluster.nodes[0].workers == 3)
        assert list(cluster.executor(2).map(add, [1, 2], [3, 4])) == [4, 6]
    err = capfd.readouterr().err
    assert 1 <= err.count("no worker can be started now") <= 3


def test_a_worker_dies_while_its_node_can_open_nothing() -> None:
    """What it reads for the error's text cannot be read: the text says so, and the node lives."""
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster:
        at_rest(cluster, 2)
        with starved(node_of(cluster)):
            killed = cluster.options(retries=0).submit(lambda: os.kill(os.getpid(), 9))
            with pytest.raises(hoplite_mp.WorkerLostError, match="memory in use: unknown"):
                killed.result(PATIENCE_S)
            assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_the_manager_dies_while_its_host_can_open_nothing() -> None:
    with (
        preforked(dict.fromkeys(WAITS, LONG_S)),
        hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster,
    ):
        at_rest(cluster, 2)
        supervisor, manager = host_of(cluster), child_of(cluster, "manager")
        before = set(supervisor.children())
        with starved(supervisor):
            manager.kill()
            eventually(lambda: not manager.is_running())  # its status was asked for
            with pytest.raises(hoplite_mp.WorkerLostError):  # reaped and reported meanwhile
                cluster.options(retries=0).submit(os._exit, 1).result(PATIENCE_S)
            assert set(supervisor.children()) < before  # a start was tried, and has failed
        parts = [cluster.submit(np.full, 300_000, float(i)) for i in range(3)]
        assert cluster.get(cluster.reduce(parts), timeout=PATIENCE_S)[5] == 3.0


def test_a_cluster_ends_while_its_host_has_no_descriptor_for_a_manager() -> None:
    """In order, with all processes that its tasks have started."""
    with preforked(dict.fromkeys(WAITS, LONG_S)), contextlib.ExitStack() as stack:
        cluster = stack.enter_context(hoplite_mp.Cluster(workers=2, memory="128MiB"))
        at_rest(cluster, 2)
        left = psutil.Process(cluster.submit(start_sleeper).result(PATIENCE_S))
        supervisor, manager = host_of(cluster), child_of(cluster, "manager")
        with starved(supervisor):
            manager.kill()
            eventually(lambda: not manager.is_running())
            stack.close()  # a supervisor that does not listen would be killed alone
    eventually(lambda: not left.is_running())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a user who has no processes yet")
def test_workers_that_have_ended_make_room_for_a_manager() -> None:
    """As many processes exist as the system permits, and two of them are workers that have ended,
    for whose status the supervisor has not asked yet: room for a manager is made by asking."""
    user = 100_000 + os.getpid()
    libc = ctypes.CDLL(None)

    def become_another() -> None:
        """A user who is not root, but reads its files; limits of processes hold for it."""
        for capability in (CAP_SYS_ADMIN, CAP_SYS_RESOURCE):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setresuid(user, 0, 0)

    def be_limited() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES_MAX, PROCESSES_MAX))
        become_another()

    others: list[subprocess.Popen[bytes]] = []

    def another() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", str(LONG_S)], preexec_fn=become_another)

    with (
        preforked(dict.fromkeys(WAITS, LONG_S), be_limited),
        hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster,
    ):
        at_rest(cluster, 2)
        supervisor, manager = host_of(cluster), child_of(cluster, "manager")
        workers = [one for one in supervisor.children() if one.name() == "hoplite worker"]
        before = set(supervisor.children())
        try:
            while tasks_of(user) <= PROCESSES_MAX + manager.num_threads():
                others.append(another())
            manager.kill()
            eventually(lambda: not manager.is_running())
            supervisor.suspend()
            assert set(supervisor.children()) == before - {manager}  # the first start has failed
            for one in workers:
                one.kill()
            eventually(lambda: all(map(is_only_a_status, workers)))
            while tasks_of(user) > PROCESSES_MAX:
                end(others.pop())
            while tasks_of(user) < PROCESSES_MAX:  # the workers had several threads
                others.append(another())
            supervisor.resume()
            eventually(lambda: "hoplite manager" in [one.name() for one in supervisor.children()])
        finally:
            supervisor.resume()
            for one in others:
                end(one)
        parts = [cluster.submit(np.full, 300_000, float(i)) for i in range(3)]
        assert cluster.get(cluster.reduce(parts), timeout=PATIENCE_S)[5] == 3.0


def test_a_host_that_finds_no_descriptor_for_a_manager_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        preforked({WAITS[0]: 0.2, WAITS[1]: LONG_S}),
        hoplite_mp.Cluster(workers=1, memory="64MiB") as cluster,
    ):
        at_rest(cluster, 1)
        supervisor, manager = host_of(cluster), child_of(cluster, "manager")
        with starved(supervisor):
            manager.kill()
            with pytest.raises(hoplite_mp.NodeLostError):
                cluster.submit(sleep_for_long).result(PATIENCE_S)
    err = capfd.readouterr().err
    assert err.count("cannot start a manager: [Errno 24] Too many open files") == 1


class ForkingSupervisor(Supervisor):
    """Has no host. Each fork has the next outcome: a pid or an error."""

    def __init__(self) -> None:
        self.start = start_message((-1, -1, -1), Config(), memory_bytes=1 << 20, host_id=5, lan=LAN)
        self.first = []
        self.ending = False
        self.outcomes: list[int | OSError] = []

    def fork(self, *about: Any) -> int:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def own_descriptors(self) -> list[int]:
        return []


def test_a_standby_waits_for_room_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt returns at once, and the host goes on without a standby in the end."""
    host = ForkingSupervisor()
    outcomes = host.outcomes
    manager = manager_process.ManagerProcess(host)
    ask = StartStandby(1, ["10.0.0.2:7001"], b"", b"")
    full = BlockingIOError(errno.EAGAIN, "no process")
    reader, writer = os.pipe()
    with open(reader, "rb") as listening:
        outcomes += [full, full, 77]
        manager.take_standby(ask, writer)
        assert (manager.pid, len(outcomes), manager.due is None) == (0, 2, False)
        manager.retry()
        assert (manager.pid, len(outcomes), manager.due is None) == (0, 1, False)
        manager.retry()
        assert (manager.pid, len(outcomes), manager.due is None) == (77, 0, True)
        monkeypatch.setattr(manager_process, "PATIENCE_S", -1.0)
        outcomes.append(full)
        manager.restart()
        assert (manager.standby, manager.due, host.ending) == (None, None, False)
        assert listening.read() == b""  # its end here is closed, so nobody calls in vain


def test_a_supervisor_gives_up_before_its_node_does() -> None:
    """It says why, which a node cannot know."""
    assert manager_process.PATIENCE_S + manager_process.RETRY_MS / 1000 < MANAGER_ABSENT_S


def test_tasks_for_which_no_worker_can_be_started() -> None:
    """They are not waited for for ever."""
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as cluster:
        assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3
        at_rest(cluster, 1)  # the supervisor has done what it does after a worker has begun
        with starved(host_of(cluster)):
            with pytest.raises(hoplite_mp.WorkerLostError):
                cluster.options(retries=0).submit(os._exit, 1).result(PATIENCE_S)
            waits = cluster.submit(add, 3, 4)
            with pytest.raises(
                hoplite_mp.WorkerLostError, match=r"could be started for .* s: Too ma"
            ):
                waits.result(PATIENCE_S)
        assert cluster.submit(add, 5, 6).result(PATIENCE_S) == 11


def test_the_limit_is_known_before_anything_is_started() -> None:
    program = """
import resource, hoplite_mp
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    hoplite_mp.Cluster(workers=12)
except hoplite_mp.ConfigError as error:
    print(error)
with hoplite_mp.Cluster(workers=2) as cluster:
    print(cluster.submit(abs, -1).result(30))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    refusal, result = done.stdout.splitlines()
    assert "workers=12 needs about 104 descriptors, and a process may open 64 here" in refusal
    assert result == "1"
