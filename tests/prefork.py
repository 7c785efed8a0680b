"""Supervisors of the tests' clusters, forked from a process that has imported everything already.

Four fifths of the processor time of a cluster's start are imports, and the tests start nearly two
thousand clusters. One process for each process of pytest imports once what supervisors, nodes and
managers import, and forks; CLONE_PARENT makes each supervisor a child of pytest's process, as if it
had been executed. Programs that tests start as processes of their own execute theirs, and so does
`pytest --execute`; also a test that has changed what only an execution takes over (limits, cores,
variables of Python, namespaces).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Template", "preforked"]

ROOT = Path(__file__).resolve().parents[1]
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
FDS_MAX = 64
MESSAGE_BYTES_MAX = 1 << 17
MODULES = (
    "numpy",
    "cloudpickle",
    "hoplite_mp._worker.main",
    "hoplite_mp._supervisor.main",
    "hoplite_mp._node.runtime.main",
    "hoplite_mp._manager.main",
    "hoplite_mp._manager.standby",
)


def conditions() -> tuple[Any, ...]:
    """What a process that is executed inherits, and one that was forked from the template has as
    the template had it."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        os.getpid(),
        [resource.getrlimit(limit) for limit in limits],
        sorted(os.sched_getaffinity(0)),
        {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_"))},
        [os.readlink(f"/proc/thread-self/ns/{kind}") for kind in ("net", "mnt")],
        sys.executable,
        sys.warnoptions,
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )


class Forked(subprocess.Popen[bytes]):
    """A child of this process that it has not made itself."""

    def __init__(self, args: list[str], pid: int) -> None:
        mine: dict[str, Any] = {
            "args": args, "pid": pid, "returncode": None, "_child_created": True,
            "stdin": None, "stdout": None, "stderr": None, "_communication_started": False,
            "_waitpid_lock": threading.Lock(), "_sigint_wait_secs": 0.25, "_input": None,
        }  # fmt: skip
        self.__dict__.update(mine)


class Template:
    """The process that forks, as its parent sees it."""

    def __init__(
        self,
        constants: dict[str, float] | None = None,
        prepare: Callable[[], None] | None = None,
        modules: Iterable[str] = (),
    ) -> None:
        """constants: values that its supervisors and their children have for these names of limits
        ("hoplite_mp._supervisor.manager_process.PATIENCE_S"). prepare: is called in the new process
        before its program is executed. modules: what it imports beside MODULES, for workers that
        would each import it."""
        self.line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.conditions = conditions()
        self.constants = constants or {}
        self.modules = tuple(modules)
        self._lock = threading.Lock()
        with other:
            self.begin(other, prepare)

    def begin(self, line: socket.socket, prepare: Callable[[], None] | None) -> None:
        """Makes the process that serves this line."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.prefork", str(line.fileno()), *self.modules],
            pass_fds=[line.fileno()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=prepare,
        )

    def run(self, command: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
        """As subprocess.Popen of a supervisor's command, with those descriptors; the last one says
        what the supervisor has to do."""
        if conditions() != self.conditions:
            return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        inherited = {"fds": fds, "env": dict(os.environ), "cwd": os.getcwd()}
        asked = json.dumps({**inherited, "constants": self.constants}).encode()
        with self._lock:
            socket.send_fds(self.line, [asked], [1, 2, *fds])
            said = self.line.recv(MESSAGE_BYTES_MAX)
        if not said:
            raise ConnectionError("the template of the tests' supervisors has ended")
        pid = int(said)
        return Forked(command, pid)

    def close(self) -> None:
        self.line.close()
        self.process.wait()


class Nearby(Template):
    """A template that is a fork of this process, which has no threads yet and has imported what a
    supervisor needs."""

    def begin(self, line: socket.socket, prepare: Callable[[], None] | None) -> None:
        if not os.fork():
            self.line.close()
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                with open(os.devnull, "r+b", 0) as nothing:
                    for fd in range(3):
                        os.dup2(nothing.fileno(), fd)
                answer(line)
            finally:
                os._exit(0)


def offer(template: Template) -> None:
    """All clusters that this process starts from now on have a supervisor of that template."""
    from hoplite_mp._client import launch

    launch.run_boot = template.run


@contextlib.contextmanager
def preforked(
    constants: dict[str, float] | None = None,
    prepare: Callable[[], None] | None = None,
    modules: Iterable[str] = (),
) -> Iterator[None]:
    """All clusters that this process starts meanwhile have a supervisor of a template that is made
    with these arguments."""
    from hoplite_mp._client import launch

    template, before = Template(constants, prepare, modules), launch.run_boot
    offer(template)
    try:
        yield
    finally:
        launch.run_boot = before
        template.close()


# -- the template itself -------------------------------------------------------------------------


def fork_sibling() -> int:
    """As os.fork, but the new process is a child of this one's parent."""
    python = ctypes.PyDLL(None)
    flags = ctypes.c_long(CLONE_PARENT | signal.SIGCHLD)
    zero = ctypes.c_long(0)
    python.PyOS_BeforeFork()
    pid = int(python.syscall(SYS_CLONE[os.uname().machine], flags, zero, zero, zero, zero))
    if pid:
        python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError("the kernel permits no fork with CLONE_PARENT: run pytest --execute")
    else:
        python.PyOS_AfterFork_Child()
    return pid


def take_place(asked: dict[str, Any], received: list[int]) -> None:
    """Gives this process what its command would have received from its parent."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    beyond = max(2, *asked["fds"]) + 1  # none of the numbers that the supervisor is told
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in [nothing, *received]]
    for fd in [nothing, *received]:
        os.close(fd)  # before their numbers are used
    for fd, number in zip(high, [0, 1, 2, *asked["fds"]], strict=True):
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def supervise(asked: dict[str, Any], received: list[int]) -> None:
    """What _supervisor/boot.py does. Does not return."""
    from hoplite_mp._supervisor import boot, main

    take_place(asked, received)
    for name, value in asked["constants"].items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(importlib.import_module(module), constant, value)
    main.main(boot.decode(boot.read(asked["fds"][-1])))


def import_all(modules: Iterable[str]) -> None:
    """Imports these, with no thread of BLAS, which a fork would lose."""
    variables = importlib.import_module("hoplite_mp._supervisor.environment").BLAS_VARIABLES
    given = {name: os.environ.get(name) for name in variables}
    os.environ.update(dict.fromkeys(variables, "1"))
    for name in modules:
        importlib.import_module(name)
    for name, value in given.items():
        os.environ.pop(name)
        os.environ.update({} if value is None else {name: value})
    gc.collect()
    gc.freeze()


def answer(line: socket.socket) -> None:
    """Forks for the parent until it closes its end."""
    while True:
        data, received, _, _ = socket.recv_fds(line, MESSAGE_BYTES_MAX, FDS_MAX)
        if not data:
            return
        pid = fork_sibling()
        if not pid:
            line.close()
            try:
                supervise(json.loads(data), received)
            finally:
                os._exit(1)
        for fd in received:
            os.close(fd)
        line.send(str(pid).encode())


if __name__ == "__main__":
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_all((*MODULES, *sys.argv[2:]))
    answer(socket.socket(fileno=int(sys.argv[1])))
