"""The supervisor: a single-threaded template process that forks and reaps a host's processes.

The template has imported NumPy, so forking a worker takes 1 ms. It runs no user code and holds no
lock, so it can always fork, wait and kill. The node process requests workers, and receives a report
of every exit. The supervisor shuts down the host at the driver's request, when the driver or the
node has exited, and when the manager has exited and is not restarted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any

import msgspec

from hoplite_mp._client.channel import seqpacket_pair
from hoplite_mp._common import clock
from hoplite_mp._protocol.local import (
    GIVEN_UP,
    NODE_DIED,
    Exited,
    Shutdown,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    StartStandby,
    ToSupervisor,
)
from hoplite_mp._supervisor.environment import (
    BLAS_VARIABLES,
    blas_environment,
    device_environment,
    limit_blas,
    record_user_settings,
)
from hoplite_mp._supervisor.exec_worker import exec_interpreter
from hoplite_mp._supervisor.manager_process import RETRY_MS, ManagerProcess
from hoplite_mp._supervisor.processes import (
    children,
    descriptors,
    kill_group,
    leave,
    print_error,
    raise_descriptor_limit,
)

__all__ = ["main"]

NODE_MAIN = ("hoplite_mp._node.runtime.main", "main")
WORKER_MAIN = ("hoplite_mp._worker.main", "main")
PRELOAD = ("numpy", "hoplite_mp._worker.main", "cloudpickle")
PACKET_BYTES_MAX = 1 << 16
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
ENDING_POLL_MS = 20
NODE_PATIENCE_S = 1.0
UNKILLABLE_TIMEOUT_S = 5.0  # for killed processes that belong to other users or hang in the kernel
EXIT_TIMEOUT_S = 1.0  # for the manager to inform other hosts, and for the node to exit
WORKER_FDS = 3  # number of descriptors that each worker needs: rpc, stdout and stderr
FDS_MAX = 253  # the kernel's limit for one message, including inherited descriptors
FIRST_SLOT = 2  # client slots 0 and 1 belong to the node and the driver

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """The loop of the template process."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.driver = socket.socket(fileno=start.supervisor_fd)
        self.node: socket.socket
        self.driver_pidfds: list[int] = []  # readable when the driver has exited
        self.workers: dict[int, tuple[int, int]] = {}  # pid -> (slot, pool)
        self.node_pid = 0
        self.manager_process = ManagerProcess(self)
        self.given_up = self.node_died = False
        self.first: list[tuple[int, list[int]]] = []  # first workers: (slot, [rpc, stdout, stderr])
        self.ending = self.orderly = False
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- children ------------------------------------------------------------------------------

    def fork(
        self, name: bytes, entry: tuple[str, str], args: tuple[Any, ...], close: list[Any]
    ) -> int:
        """Forks a child in a new session. The child is killed when this process exits. `name`: the
        process name for ps and top, at most 15 bytes. `entry`: the module and the name of the
        function that the child calls. `close`: the descriptors that the child closes first."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            _libc.prctl(PR_SET_NAME, name, 0, 0, 0)
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for thing in close:
                thing.close() if hasattr(thing, "close") else os.close(thing)
            module, main_of = entry
            run = getattr(importlib.import_module(module), main_of)
            gc.freeze()  # the garbage collector need not scan the imported modules
            gc.enable()
            code = run(*args) or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            leave(code)
        return 0

    def own_descriptors(self) -> list[Any]:
        """Descriptors and sockets that children must close."""
        return [self.driver, self.node, self.wake_read, self.wake_write, *self.driver_pidfds]

    def start_services(self) -> None:
        """Starts the node and the manager, and creates the first workers' connections, so that
        these workers need not wait for the node."""
        s = self.start
        lan = s.lan
        manages = lan is None or not lan.manager
        self.node, node_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        to_manager, manager_end = socket.socketpair()
        nodes_ends = [self.make_channels(FIRST_SLOT + i) for i in range(s.workers)]
        given = msgspec.structs.replace(s, first_workers=nodes_ends)
        workers_ends = [fd for _, fds in self.first for fd in fds]
        self.node_pid = self.fork(
            b"hoplite node",
            NODE_MAIN,
            (given, node_end.fileno(), to_manager.fileno() if manages else -1),
            [*self.own_descriptors(), manager_end, *workers_ends, *descriptors(lan, "manager_fd")],
        )
        for fd in (s.rpc_fd, s.output_fd, *(fd for _, *fds in nodes_ends for fd in fds)):
            os.close(fd)
        node_end.close()
        to_manager.close()
        if manages:
            self.manager_process.begin(manager_end)
        manager_end.close()
        for fd in descriptors(lan, "peer_fd"):
            os.close(fd)

    def make_channels(self, slot: int) -> tuple[int, int, int, int]:
        """Creates the connection and pipes for one of the first workers. Adds the worker's ends to
        `first`, and returns the node's ends."""
        node_end, worker_end = seqpacket_pair()
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        self.first.append((slot, [worker_end.detach(), out[1], err[1]]))
        return slot, node_end.detach(), out[0], err[0]

    def spawn_first(self) -> None:
        while self.first:
            slot, fds = self.first.pop(0)
            self.spawn(Spawn(slot, 0, 0, 0, processes=self.start.workers), fds)

    def spawn(self, request: Spawn, fds: list[int]) -> None:
        s = self.start
        if len(fds) < WORKER_FDS:
            self.not_spawned(request.slot, fds, "Too many open files")
            return
        rpc_fd, out_fd, err_fd, *inherited = fds
        sys.stdout.flush()
        sys.stderr.flush()
        blas = blas_environment(s.config.get("blas_threads"), s.cores, request.processes)
        environment = {**blas, **device_environment(request.assigned)}

        def run() -> int:
            os.dup2(out_fd, 1)
            os.dup2(err_fd, 2)
            os.close(out_fd)
            os.close(err_fd)
            if request.env:
                exec_interpreter(s, request, rpc_fd, inherited, environment)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            os.environ.update(environment)
            limit_blas(environment)
            main_of = getattr(importlib.import_module(WORKER_MAIN[0]), WORKER_MAIN[1])
            code = main_of(
                s.control_fd,
                s.store_fd,
                s.event_fd,
                rpc_fd,
                request.slot,
                request.pool,
                request.max_tasks,
                request.setup,
                request.output_owner,
                f"worker {request.slot}@h",
                s.config,
                s.inherited_settings,
                inherited,
            )
            return int(code)

        close = [*self.own_descriptors(), *(fd for _, others in self.first for fd in others)]
        close += descriptors(s.lan, "manager_fd")
        standby = self.manager_process.standby
        close += [] if standby is None else [standby[0].manager_fd]
        try:
            pid = self.fork(b"hoplite worker", (__name__, "_run_in_child"), (run,), close)
        except OSError as error:  # too many processes, or too little memory
            self.not_spawned(request.slot, fds, os.strerror(error.errno or 0))
            return
        for fd in fds:
            os.close(fd)
        self.workers[pid] = (request.slot, request.pool)
        self.send_node(Spawned(request.slot, pid))

    def not_spawned(self, slot: int, fds: list[int], why: str) -> None:
        for fd in fds:
            os.close(fd)
        self.send_node(SpawnFailed(slot, why))

    def send_node(self, message: Spawned | SpawnFailed | Exited) -> None:
        with contextlib.suppress(OSError):
            self.node.send(msgspec.msgpack.encode(message))

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.workers:
                slot, _ = self.workers.pop(pid)
                kill_group(pid)  # kills processes that tasks have started, except in new sessions
                self.send_node(Exited(slot, pid, os.waitstatus_to_exitcode(status)))
            elif pid in (self.node_pid, self.manager_process.pid):
                self.record_exit(pid, status)
                if pid == self.manager_process.pid:
                    self.manager_process.pid = 0
                    if self.manager_process.standby is not None and not status:
                        continue  # the cluster was shut down, and the node was informed
                    # Status 0: the manager has exited because the node has exited.
                    if not self.ending and self.node_pid and status and not self.given_up:
                        self.manager_process.restart()
                    else:
                        self.ending = True
                else:
                    self.node_pid = 0
                    self.ending = True

    def record_exit(self, pid: int, status: int) -> None:
        """Interprets the exit code of the node or the manager. GIVEN_UP: this host was declared
        dead, or this manager had to step down. Other codes except 0: the process has failed."""
        code = os.waitstatus_to_exitcode(status)
        if pid in (self.node_pid, self.manager_process.pid):
            self.given_up = self.given_up or code == GIVEN_UP
        if pid == self.node_pid and code not in (0, GIVEN_UP) and not self.ending:
            self.node_died = True

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        poll = select.poll()
        try:
            driver_fd = os.pidfd_open(self.start.driver_pid)
            self.driver_pidfds.append(driver_fd)
            poll.register(driver_fd, select.POLLIN)
        except OSError:
            return  # the driver has exited
        poll.register(self.driver, select.POLLIN)
        poll.register(self.node, select.POLLIN)
        poll.register(self.wake_read, select.POLLIN)
        decoder = msgspec.msgpack.Decoder(ToSupervisor)
        self.reap()
        while not self.ending:
            for fd, _ in poll.poll(RETRY_MS if self.manager_process.due else None):
                if fd == driver_fd:
                    self.ending = True
                elif fd == self.wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_read, 4096)
                    self.reap()
                elif fd == self.driver.fileno():
                    data = self.driver.recv(PACKET_BYTES_MAX)
                    if data and isinstance(decoder.decode(data), Shutdown):
                        self.orderly = True  # workers are informed separately, and may clean up
                    self.ending = True
                elif fd == self.node.fileno():
                    try:
                        data, fds, flags, _ = socket.recv_fds(self.node, PACKET_BYTES_MAX, FDS_MAX)
                    except OSError:  # the node died before it had read all data
                        data, fds, flags = b"", [], 0
                    if not data:
                        self.await_node()
                        self.ending = True
                        poll.unregister(self.node)
                        break
                    self.take(decoder.decode(data), fds, bool(flags & socket.MSG_CTRUNC))
            if not self.ending:
                self.manager_process.retry()

    def take(self, message: Spawn | StartStandby | Shutdown, fds: list[int], cut: bool) -> None:
        """Handles a message from the node. `cut`: whether some of its descriptors are missing."""
        if isinstance(message, Spawn) and cut:
            self.not_spawned(message.slot, fds, "Too many open files")
        elif isinstance(message, Spawn):
            self.spawn(message, fds)
        elif isinstance(message, StartStandby) and fds:
            self.manager_process.take_standby(message, fds[0])
        elif isinstance(message, StartStandby):
            print("hoplite_mp: no standby: too many open files", file=sys.stderr, flush=True)

    def wait_for_child(self) -> None:
        """Waits until a child exits, for at most ENDING_POLL_MS."""
        select.select([self.wake_read], [], [], ENDING_POLL_MS / 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 4096)

    def wait_and_reap(self) -> None:
        """Waits until a child exits, for at most ENDING_POLL_MS, and reaps children."""
        self.wait_for_child()
        self.reap()

    def await_node(self) -> None:
        """Waits for the exit code of the node after it has closed its connection."""
        deadline = clock.monotonic() + EXIT_TIMEOUT_S
        while self.node_pid and clock.monotonic() < deadline:
            self.wait_and_reap()

    def end(self, patience_s: float) -> None:
        """Shuts down the host. Workers are killed after `patience_s`."""
        deadline = clock.monotonic() + patience_s
        while self.workers and clock.monotonic() < deadline:
            self.wait_and_reap()
        for pid in self.workers:
            self.kill(pid)
        if self.orderly:
            self.await_last_output()
        self.let_manager_end_cluster()
        for pid in (self.node_pid, self.manager_process.pid):
            if pid:
                self.kill(pid)
        deadline = clock.monotonic() + UNKILLABLE_TIMEOUT_S
        while clock.monotonic() < deadline:
            # These include adopted children: processes that tasks have started are killed, too.
            for pid in children():
                self.kill(pid)
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                self.record_exit(pid, status)
                kill_group(pid)
            else:
                self.wait_for_child()
        print_error(f"these processes cannot be killed: {children()}")

    def await_last_output(self) -> None:
        """Waits until the node has forwarded the workers' last lines to the driver and has
        exited."""
        deadline = clock.monotonic() + NODE_PATIENCE_S
        with contextlib.suppress(OSError):
            self.node.shutdown(socket.SHUT_WR)  # all exits have been reported
        while self.node_pid and clock.monotonic() < deadline:
            self.wait_and_reap()

    def let_manager_end_cluster(self) -> None:
        """Lets the manager inform other hosts of the shutdown; otherwise they would wait for a new
        manager. Does nothing after a failure if a standby can take over."""
        lan = self.start.lan
        if not self.manager_process.pid or lan is None or (lan.standby and not self.orderly):
            return
        deadline = clock.monotonic() + EXIT_TIMEOUT_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.manager_process.pid, signal.SIGTERM)
        self.ending = True
        while self.manager_process.pid and clock.monotonic() < deadline:
            self.wait_and_reap()

    def kill(self, pid: int) -> None:
        kill_group(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's (sudo)
            os.kill(pid, signal.SIGKILL)


def _run_in_child(run: Any) -> int:
    return int(run())


def _start_children(supervisor: Supervisor) -> bool:
    """Imports the modules that the children share, and starts the node, the manager and the first
    workers. Returns False if the process limit is reached."""
    for name in BLAS_VARIABLES:
        os.environ[name] = "1"  # NumPy's BLAS must not start threads, which a fork would lose
    for module in PRELOAD:
        importlib.import_module(module)
    try:
        supervisor.start_services()
    except BlockingIOError:  # EAGAIN: the limit was reached after the driver had checked it
        print_error(
            "cannot start node and manager: this user's process limit is reached (ulimit -u)"
        )
        supervisor.node_died = True
        return False
    for name in BLAS_VARIABLES:
        os.environ.pop(name, None)
    importlib.import_module(WORKER_MAIN[0]).warm_up()
    gc.collect()
    gc.freeze()
    gc.enable()
    supervisor.spawn_first()
    return True


def main(start: Start) -> None:
    """Runs the supervisor until the host is shut down."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    raise_descriptor_limit()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    record_user_settings()
    supervisor = Supervisor(start)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(supervisor.wake_write, warn_on_full_buffer=False)
    try:
        if _start_children(supervisor):
            supervisor.run()
    finally:
        grace_s = float(start.config.get("cancel_grace_s", 2.0))
        supervisor.end(grace_s if supervisor.orderly else 0.0)
    code = GIVEN_UP if supervisor.given_up else 0
    os._exit(NODE_DIED if supervisor.node_died else code)
