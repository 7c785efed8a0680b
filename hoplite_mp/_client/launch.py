"""Starts a host (shared memory, sockets, the supervisor) and shuts it down.

The driver creates the control memory itself, so it can submit tasks before any other process runs.
The supervisor receives all resources as descriptors and values, and no named file is created.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import _serialize, _shm, errors
from hoplite_mp._client.channel import Channel, dump, seqpacket_pair
from hoplite_mp._client.demands import WORKERS_MAX
from hoplite_mp._client.descriptors import (
    Watched,
    close_socket,
    fill_standard_descriptors,
    lift,
    lift_socket,
)
from hoplite_mp._client.inherited_context import inherited_settings_here, share_authkey
from hoplite_mp._client.printing import Printer
from hoplite_mp._client.runtime import Runtime
from hoplite_mp._common import clock, ids
from hoplite_mp._common.locks import starting_thread
from hoplite_mp._common.machine_limits import (
    address_space_left,
    cpu_count,
    file_size_limit,
    format_bytes,
    processes_left,
    total_bytes,
)
from hoplite_mp._common.object_states import DRIVER_SLOT, NODE_SLOT
from hoplite_mp._protocol.local import GIVEN_UP, NODE_DIED, Shutdown, Start
from hoplite_mp._protocol.output import MarkOutput
from hoplite_mp._protocol.secret import encode_secret
from hoplite_mp.config import MIB, SPAN_BYTES_MIN
from hoplite_mp.errors import ClosedError, ConfigError, HopliteError, ManagerLostError

if TYPE_CHECKING:
    from hoplite_mp._client.network import HostNetwork
    from hoplite_mp.config import Config

__all__ = ["HostProcesses", "check_room_to_attach", "store_size"]

# The size of a host's store: the limit for its objects, and the length of its sparse file.
#
# Every process on a host maps the whole file. The file's length therefore counts against each
# process's `ulimit -v`, and against `ulimit -f`, although it costs no memory. If such a limit is
# set, the store takes at most half of the remaining space; the other half is for the program.


LENGTH_MIN, LENGTH_MAX = 64 << 30, 32 << 40  # address space, not memory
MEMORY_MAX = LENGTH_MAX // 2
FACTOR = 8  # file length / limit; fragmentation then never prevents an allocation
FACTOR_MIN = 2  # the same under a ulimit; separate free ranges are combined more often
DEFAULT_MIN = 64 * MIB  # a smaller store needs an explicit memory=
ROOM_SHARE = 2  # the store uses at most 1/ROOM_SHARE of the space that a limit leaves
ADDRESSES, FILES = "address space (ulimit -v)", "file length (ulimit -f)"


def store_size(memory: int | None) -> tuple[int, int]:
    """Returns (limit of the store, length of its file), in bytes. memory: the requested limit; None
    means a third of the host's memory, or less under a ulimit. Raises ConfigError if no such store
    can be created."""
    limit = memory or total_bytes() // 3
    if limit > MEMORY_MAX:
        raise ConfigError(f"memory={limit}: it must be at most {MEMORY_MAX} bytes (16 TiB)")
    length = min(max(LENGTH_MIN, FACTOR * limit), LENGTH_MAX)
    room, left, which = _room()
    if length <= room:
        return limit, length
    most = room // FACTOR_MIN
    if memory is None and most >= DEFAULT_MIN:
        return min(limit, most), room
    if memory is not None and memory <= most:
        return memory, room
    requested = f"memory={memory}" if memory else f"a store of {format_bytes(DEFAULT_MIN)}"
    wanted = memory or DEFAULT_MIN
    needed = ROOM_SHARE * FACTOR_MIN * wanted
    if which == ADDRESSES:
        needed += ROOM_SHARE * _shm.CONTROL_MEMORY_BYTES
    else:
        needed = max(needed, _shm.CONTROL_MEMORY_BYTES)
    smaller = f", or ask for at most memory={most}" if memory and most >= MIB else ""
    raise ConfigError(
        f"{requested} needs about {format_bytes(needed)} of {which}, and the limit leaves "
        f"{format_bytes(left)}: raise the limit{smaller}"
    )


def _room() -> tuple[int, int, str]:
    """Returns (maximum length of the store's file, space that the tightest limit leaves, the
    limit's name)."""
    addresses, files = address_space_left(), file_size_limit()
    by_addresses = addresses // ROOM_SHARE - _shm.CONTROL_MEMORY_BYTES
    by_files = files // ROOM_SHARE if files >= _shm.CONTROL_MEMORY_BYTES else 0
    if by_addresses <= by_files:
        return max(0, by_addresses) & ~4095, addresses, ADDRESSES
    return by_files & ~4095, files, FILES


def check_room_to_attach(control_fd: int, store_fd: int) -> None:
    """Raises ConfigError if this process's limits are too small for the existing node's memory."""
    lengths = [os.fstat(fd).st_size for fd in (control_fd, store_fd)]
    for needed, left, which in (
        (sum(lengths), address_space_left(), ADDRESSES),
        (max(lengths), file_size_limit(), FILES),
    ):
        if needed > left:
            raise ConfigError(
                f"the store of this host's node needs {format_bytes(needed)} of {which}, and the "
                f"limit leaves {format_bytes(left)} here: raise the limit in this process, or "
                "start the node under the same limit"
            )


PROCESSES_BESIDE = 2  # processes other than workers that put small objects: driver and node
SPANS_SHARE = 2  # spans are halved until all together use at most 1/2 of the store
# Descriptors in the process that starts a host: for each worker, both ends of its connection and of
# its two output pipes; and the number of all others, including those for a network.
DESCRIPTORS_PER_WORKER, DESCRIPTORS_BESIDE = 6, 32
PROCESSES_BESIDE_WORKERS = 3  # supervisor, node and manager
THREADS_HERE = 2  # threads in the process that starts a host: output and completions
BOOT_FILE = os.path.join("_supervisor", "boot.py")
READ_BYTES = 1 << 16
READER_PATIENCE_S = 1.0  # maximum wait for the printing thread, which stdout may block
_log = logging.getLogger("hoplite_mp")


class HostProcesses:
    """The processes on one host, as seen by the driver that started them."""

    attached = False  # whether another process has started the node
    standby: tuple[str, ...] = ()  # addresses of the cluster's standby
    holds_standby = ""  # the standby's address, if it is on this host

    def __init__(
        self,
        workers: int | None,
        memory: int | None,
        config: Config,
        network: HostNetwork | None = None,
    ) -> None:
        cores = cpu_count()
        self.workers = min(cores, WORKERS_MAX) if workers is None else workers
        limit, length = store_size(memory or config.memory_bytes)
        config = _with_spans_that_fit(config, limit, self.workers)
        _check_descriptors(self.workers)
        _check_processes(self.workers)
        _check_spill_dir(config)
        self.limit = limit
        fill_standard_descriptors()
        control_fd = os.memfd_create("hoplite_mp control", os.MFD_CLOEXEC)
        store_fd = os.memfd_create("hoplite_mp store", os.MFD_CLOEXEC)
        event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        host_id = ids.random_host_id()
        _shm.create(
            control_fd,
            store_fd,
            host_id,
            length,
            cores,
            config.spin_us_max,
            config.small_object_bytes_max,
            config.span_bytes,
        )
        self.supervisor, supervisor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rpc, rpc_end = seqpacket_pair()
        self.output, output_end = socket.socketpair()
        ends = (supervisor_end, rpc_end, output_end)
        inherited_settings = inherited_settings_here()
        start = Start(
            sys_path=[],
            control_fd=control_fd,
            store_fd=store_fd,
            event_fd=event_fd,
            supervisor_fd=supervisor_end.fileno(),
            rpc_fd=rpc_end.fileno(),
            output_fd=output_end.fileno(),
            driver_pid=os.getpid(),
            workers=self.workers,
            cores=cores,
            memory_bytes=limit,
            config=dataclasses.asdict(config),
            host_id=host_id,
            inherited_settings=inherited_settings,
            lan=None if network is None else network.start(host_id),
        )
        sockets = [] if network is None else network.descriptors
        self.process = _execute(
            start, [control_fd, store_fd, event_fd, *(e.fileno() for e in ends), *sockets]
        )
        share_authkey(inherited_settings)
        if network is not None:
            network.close()
        for end in ends:
            end.close()
        self.supervisor, self.output = lift_socket(self.supervisor), lift_socket(self.output)
        event_fd = lift(event_fd)
        self.runtime = Runtime(
            control_fd, store_fd, event_fd, DRIVER_SLOT, Channel(rpc), config, "driver", hidden=True
        )  # hidden until its Cluster is complete
        # The node starts with this span leased to the driver, so the driver need not request it.
        self.runtime.client.add_span(config.span_bytes)
        for fd in (control_fd, store_fd):
            os.close(fd)
        self._event = Watched(event_fd)
        self._line = Watched(self.supervisor.fileno())
        self._config = config
        self._joined = network.address if network is not None and network.manager else ""
        try:
            self._watch()
        except BaseException:
            self._kill()
            self.process.wait()
            raise

    def _watch(self) -> None:
        """Starts a thread that reads the node's output. The thread ends when the node exits."""
        self._output_line = Watched(self.output.fileno())
        self.lost = False
        self.ended = threading.Event()
        self._reason_known = threading.Event()  # set when the reason for the node's exit is known
        memory = self.runtime.memory
        memory.await_lost = self._await_lost
        self.runtime.channel.why_gone = memory.node_gone
        self._ending = False
        channel = self.runtime.channel  # the thread must keep the channel alive, but not `self`
        self._printer = Printer(lambda number: channel.tell(MarkOutput(number)))
        self._printer.follow_cells()
        self.runtime.memory.print_lines = self._print_lines
        self._reader = threading.Thread(
            target=self._read_output, name="hoplite_mp output", daemon=True
        )
        with starting_thread("prints the workers' output"):
            self._reader.start()

    def _print_lines(self, timeout: float | None) -> None:
        """Waits until all lines that workers have printed so far are written, or until the
        timeout."""
        if self._reader is not threading.current_thread():  # in a callback of a Future
            self._printer.wait(timeout)

    def _read_output(self) -> None:
        """Prints the workers' lines until the node exits."""
        try:
            self._forward_output()
        except Exception:
            _log.exception("the workers' output cannot be read")
        finally:
            try:
                self._printer.end()
            finally:
                self._node_ended()

    def _forward_output(self) -> None:
        self.output.settimeout(self._config.start_timeout_s)
        decoder = msgspec.msgpack.Decoder(tuple[int, str, bytes])
        data = bytearray()
        while True:
            try:
                piece = self.output.recv(READ_BYTES)
            except TimeoutError:
                self.output.settimeout(None)
                if not self.runtime.tasks.pid(NODE_SLOT):
                    waited = self._config.start_timeout_s
                    _log.error("the host did not start within %g s (start_timeout_s)", waited)
                    # The process has not been reaped, so its pid has not been reused.
                    os.kill(self.process.pid, signal.SIGKILL)
                continue
            except OSError:
                piece = b""
            if not piece:
                return
            data += piece
            while len(data) >= 4:
                size = int.from_bytes(data[:4], "little")
                if len(data) < 4 + size:
                    break
                self._printer.take(*decoder.decode(bytes(data[4 : 4 + size])))
                del data[: 4 + size]

    def _node_ended(self) -> None:
        """Fails all pending objects. Called by the thread that reads the output, and therefore even
        if `end()` was interrupted."""
        runtime = self.runtime
        try:
            if self._ending:
                error: HopliteError = ClosedError("the cluster was closed before this was done")
            else:
                self.lost = True
                error = self._why_lost()
            if runtime.memory.lost is None:
                runtime.memory.lost = error
            self._reason_known.set()
            runtime.tasks.lose()
            if self._ending:  # the thread that closes the cluster calls the callbacks
                runtime.submitter.fail_pending(error)
            else:
                runtime.submitter.abandon(error)
        finally:
            self._reason_known.set()
            self.ended.set()

    def _await_lost(self) -> None:
        """Waits until the thread that reads the output has set `Memory.lost`. The user's stdout may
        block that thread, so the wait has a time limit. After the limit, the error is raised
        without a reason."""
        if self._reader is not threading.current_thread():
            self._reason_known.wait(2 * READER_PATIENCE_S)

    @property
    def removed(self) -> bool:
        """Whether `remove_node` has made this host's node leave its cluster."""
        return self.runtime.client.removed

    def _why_removed(self) -> HopliteError:
        error = errors.NodeLostError(
            f"node {self.runtime.node_name}, through which this process took part in the cluster "
            f"at {self._joined}, was removed from it by remove_node(); open "
            f"Cluster(address={self._joined!r}) again to continue"
        )
        _log.info("%s", error)
        return error

    def _why_lost(self) -> HopliteError:
        if self.removed:
            return self._why_removed()
        code = clock.wait_for_process(self.process, READER_PATIENCE_S)
        if self._joined and code == GIVEN_UP:
            _log.error("the cluster has declared this host lost")
            return ManagerLostError(
                f"the cluster at {self._joined} has declared this host lost, because its "
                "heartbeats did not arrive in time (Config.heartbeat_timeout_s); open "
                "Cluster(address=...) again to continue"
            )
        if self._joined and code != NODE_DIED:  # the manager has shut down the cluster
            error = ManagerLostError(f"the cluster at {self._joined} has ended")
            _log.info("%s", error)
            return error
        if code == GIVEN_UP:
            _log.error("the manager on this host has stepped down: it has lost most other hosts")
            return ManagerLostError("the manager on this host has stepped down")
        _log.error("the node of this host has ended unexpectedly; the cluster is lost")
        return errors.NodeLostError("the node of this host has ended")

    def end(self) -> None:
        """Stops all processes, and waits until they have exited."""
        self._ending = True
        client = self.runtime.client
        if client.usable:
            client.set_closing()
            self.runtime.tasks.wake_pool_all()
        try:
            with contextlib.suppress(OSError):
                # If user code has closed the connection, the supervisor stops everything.
                if self._line.there():
                    self.supervisor.send(dump(Shutdown()))
            self._wait_gone()
        finally:  # even after Ctrl-C: closing all connections stops the processes
            with contextlib.suppress(OSError):
                if self.output.fileno() >= 0 and self._output_line.there():
                    self.output.shutdown(socket.SHUT_RDWR)
            self._join_reader()
            close_socket(self.output, self._output_line)
            close_socket(self.supervisor, self._line)
            self.runtime.close()
            client.give_back_all()
            self._event.close()

    @property
    def given_up(self) -> bool:
        """Whether the cluster declared this host dead while the host was still running. Valid after
        `end`."""
        return self.process.returncode == GIVEN_UP

    @property
    def node_died(self) -> bool:
        """Whether the node was killed or has failed. Valid after `end`."""
        return self.process.returncode == NODE_DIED

    def _join_reader(self) -> None:
        if self._reader is not threading.current_thread():
            self._reader.join(READER_PATIENCE_S)

    def _wait_gone(self) -> None:
        try:
            if clock.wait_for_process(self.process, self._config.shutdown_timeout_s) is None:
                self._kill()  # this also kills its children (PDEATHSIG)
                self.process.wait()
        except BaseException:  # after Ctrl-C, nothing waits for the processes again
            self._kill()
            raise

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)


def _with_spans_that_fit(config: Config, limit: int, workers: int) -> Config:
    """The configuration with spans that fit into the store. Every process that puts objects needs
    its own span. In a small store, spans are halved down to a minimum, so that half of the store is
    left for large objects and for workers that replace blocked workers. Raises ConfigError if even
    the smallest spans do not fit."""
    processes = workers + PROCESSES_BESIDE
    span, smallest = config.span_bytes, 2 * config.small_object_bytes_max
    while SPANS_SHARE * processes * span > limit and span // 2 >= max(smallest, SPAN_BYTES_MIN):
        span //= 2
    if processes * span > limit:
        raise ConfigError(
            f"memory={limit} is too small for {workers} workers: each of {processes} processes "
            f"needs {span} bytes for its small objects, {processes * span} in total. Raise "
            "memory=, start fewer workers, or lower small_object_bytes_max"
        )
    return dataclasses.replace(config, span_bytes=span)


def _check_spill_dir(config: Config) -> None:
    """Raises ConfigError if the spill directory does not exist or cannot be written to."""
    where = config.spill_dir
    if where is None or config.spill_bytes_max == 0:
        return
    if not os.path.isdir(where):
        raise ConfigError(f"spill_dir={where!r} is not a directory on this host: create it first")
    if not os.access(where, os.W_OK | os.X_OK):
        raise ConfigError(f"spill_dir={where!r}: this process cannot write to it")


def _check_descriptors(workers: int) -> None:
    """Raises ConfigError if this process may not open enough descriptors for the start. Later
    shortages only cause delays, so they are not checked."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_BESIDE + DESCRIPTORS_PER_WORKER * workers
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"workers={workers} needs about {needed} descriptors, and a process may open {hard} "
            "here: raise the hard limit (ulimit -Hn), or start fewer workers"
        )


def _check_processes(workers: int) -> None:
    """Raises ConfigError if this user may not start enough processes and threads."""
    needed = PROCESSES_BESIDE_WORKERS + THREADS_HERE + workers
    left, which = processes_left()
    if left < needed:
        raise ConfigError(
            f"workers={workers} needs {needed} more processes and threads, and {left} are allowed "
            f"here ({which}): raise the limit, or start fewer workers"
        )


def interpreter() -> str:
    """The path of the Python interpreter for new processes. Raises ConfigError if there is none, as
    in a program that embeds Python."""
    if sys.executable:
        return sys.executable
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = os.path.join(sys.exec_prefix, "bin", version)
    if os.access(found, os.X_OK):
        return found
    raise ConfigError(
        f"sys.executable={sys.executable!r}, and {found} does not exist: set sys.executable to the "
        "path of a Python interpreter with this program's packages before opening a cluster"
    )


def _execute(start: Start, fds: list[int]) -> subprocess.Popen[bytes]:
    import json

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    boot = os.path.join(root, "hoplite_mp", BOOT_FILE)
    # Made absolute, because the program and its tasks may change their working directories.
    path = [p if os.path.isabs(p) else os.path.abspath(p) for p in sys.path if isinstance(p, str)]
    path += [] if root in path else [root]
    _serialize.set_readers_path(path)
    start = msgspec.structs.replace(start, sys_path=[])
    body = msgspec.msgpack.encode(start, enc_hook=encode_secret)
    listed = json.dumps(path).encode()
    info = os.memfd_create("hoplite_mp start", os.MFD_CLOEXEC)
    os.write(info, len(listed).to_bytes(8, "little") + listed + body)
    os.lseek(info, 0, os.SEEK_SET)
    # Like multiprocessing's processes, the supervisor and its workers inherit -O, -W and -X.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    try:
        return run_boot([interpreter(), *flags, boot, str(info)], [*fds, info])
    finally:
        os.close(info)


def run_boot(command: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
    """Executes a command. The new process inherits these descriptors under the same numbers. Ctrl-C
    is blocked until boot.py ignores it, because it must not interrupt the imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=_inherited_or_null(1),
            stderr=_inherited_or_null(2),
        )
    except BlockingIOError as error:  # EAGAIN from fork
        raise ConfigError(
            "no process can be started: this user has the maximum number of processes; raise "
            "the limit (ulimit -u, or that of the control group)"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _inherited_or_null(fd: int) -> int | None:
    """The argument of `subprocess.Popen` for this standard descriptor: None (inherited), or
    `DEVNULL` if the descriptor is not inheritable. If the program was started without a standard
    descriptor, a library's file may have its number."""
    return None if os.get_inheritable(fd) else subprocess.DEVNULL
