"""Programs of tests, on emulated hosts and here, forked from a process that has imported all of it.

Most of the processor time of the tests of several hosts went into imports, of each `hoplite-mp up`
and `join`, of their supervisors, and of each driver. One process imports once what all of these
import. For each program it forks two: one enters the host's namespaces and waits, as nsenter does,
and its child is the program. What that starts as a user's would (processes, threads, the supervisor
of a host) it starts by itself. `pytest --execute` executes programs, and so do other commands than
Python's, and a test that has changed what only an execution takes over.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import traceback
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoplite_mp._supervisor import environment
from tests import prefork

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Programs", "executed", "own_pid", "popen", "programs", "run"]

MODULES = (
    *prefork.MODULES,
    "hoplite_mp._cli.main",
    "hoplite_mp._cli.up_join",
    "hoplite_mp._api.collectives",
    "hoplite_mp._api.executor",
    "hoplite_mp._group.group",
    "hoplite_mp._api.objects",
    "hoplite_mp._api.pools",
    "hoplite_mp._client.open_cluster",
    "hoplite_mp._client.mapping",
    "hoplite_mp._client.network",
)
# Order of nsenter: the namespace of mounts last, because /proc is another one in it.
NAMESPACES = ("uts", "ipc", "net", "pid", "mnt")
# Options of subprocess.Popen that a fork can have.
PLAIN = {"stdin", "stdout", "stderr", "text", "start_new_session"}
FAILED, INTERRUPTED = 127, 130
ROOT = str(prefork.ROOT)
# Variables that a fork follows, too.
FOLLOWED = {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": ""}
# Variables that modules read when they are imported.
READ = ("HOPLITE_MP_DEBUG_LOCKS", *environment.BLAS_VARIABLES)
SERVE = "from tests.lan import forked; forked.serve"

made: Programs | None = None


class Programs:
    """The process that forks, as pytest sees it."""

    def __init__(self, *modules: str) -> None:
        """modules: what it imports beside MODULES."""
        self.modules = modules
        self.line, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.conditions = prefork.conditions()
        self.process: subprocess.Popen[bytes] | None = None  # until the first program
        self._lock = threading.Lock()

    def _begin(self) -> None:
        with self._other as other:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{SERVE}{other.fileno(), *self.modules}"],
                pass_fds=[other.fileno()],
                cwd=prefork.ROOT,
                env={**os.environ, "PYTHONPATH": str(prefork.ROOT)},
            )

    def can_run(self, command: Sequence[str], env: dict[str, str], options: dict[str, Any]) -> bool:
        """Is a fork like an execution of that command?"""
        if list(command[:1]) != [sys.executable] or options.keys() - PLAIN:
            return False
        known = list(command[1:3]) == ["-m", "hoplite_mp"] or command[1] == "-c"
        if not known and command[1].startswith("-"):
            return False
        if any(env.get(name) not in (None, os.environ.get(name)) for name in READ):
            return False
        mine, theirs = (
            {name: value for name, value in given.items() if name.startswith("PYTHON")} | FOLLOWED
            for given in (os.environ, env)
        )
        return mine == theirs and prefork.conditions() == self.conditions

    def start(
        self, host: int | None, command: Sequence[str], env: dict[str, str], cwd: str = "/",
        **options: Any,
    ) -> subprocess.Popen[Any]:  # fmt: skip
        """As subprocess.Popen of that command, on the host with this first process (there nsenter's
        folder is the root); None: on this one."""
        asked = {"host": host, "arguments": list(command[1:]), "env": env, "cwd": cwd}
        asked["leads"] = options.get("start_new_session", False)
        return Program(list(command), asked=asked, of=self, **options)

    def fork(self, asked: dict[str, Any], fds: list[int]) -> int:
        """The pid of the process that has entered the host."""
        with self._lock:
            if self.process is None:
                self._begin()
            socket.send_fds(self.line, [json.dumps(asked).encode()], fds)
            said = self.line.recv(prefork.MESSAGE_BYTES_MAX)
        if not said:
            raise ConnectionError("the process that forks the tests' programs has ended")
        return int(said)

    def close(self) -> None:
        self.line.close()
        self._other.close()
        if self.process is not None:
            self.process.wait()


@contextlib.contextmanager
def programs(*modules: str) -> Iterator[None]:
    """Programs are forked meanwhile, with MODULES and these modules."""
    global made
    before, made = made, Programs(*modules)
    try:
        yield
    finally:
        made.close()
        made = before


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Programs are executed meanwhile, as those of users."""
    global made
    before, made = made, None
    try:
        yield
    finally:
        made = before


def popen(
    command: Sequence[str], env: dict[str, str], cwd: Path | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """As subprocess.Popen, on this host."""
    if made is not None and made.can_run(command, env, options):
        return made.start(None, command, env, str(cwd or Path.cwd()), **options)
    return subprocess.Popen(command, env=env, cwd=cwd, **options)


def run(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, on this host, with what the program writes as text."""
    pipe = subprocess.PIPE
    environ = dict(os.environ) if env is None else env
    with popen(command, environ, cwd, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def own_pid() -> int | None:
    """Of the process that forks, which lives as long as pytest's."""
    return None if made is None or made.process is None else made.process.pid


class Program(subprocess.Popen[Any]):
    """A child of this process that it has not made itself, with pipes that it has."""

    def __init__(self, args: list[str], *, asked: dict[str, Any], of: Programs, **options: Any):
        self._asked, self._of = asked, of
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        # What CPython's own method of this name is given, after ten other arguments.
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        ends = [p2cread, c2pwrite, errwrite]
        fds = [number if end == -1 else end for number, end in enumerate(ends)]
        try:
            self.pid = self._of.fork(self._asked, fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


# -- the process that forks ----------------------------------------------------------------------


def enter(host: int) -> None:
    """Enters the namespaces of that process; children are in its namespace of pids, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    fds = [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES]
    for fd in fds:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)


def stand_in(asked: dict[str, Any], received: list[int]) -> int:
    """What nsenter does: its child is the program, whose end is its own. Returns the exit code."""
    try:
        enter(asked["host"])
    except OSError as error:  # the host has ended
        os.write(received[2], f"cannot enter the host: {error}\n".encode())
        return 1
    pid = os.fork()
    if not pid:
        os._exit(begin(asked, received))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            return os.WEXITSTATUS(status)


def begin(asked: dict[str, Any], received: list[int]) -> int:
    """Makes this process what its command would have made of it, and runs the program."""
    try:
        if asked["leads"]:
            os.setsid()
        take_place(asked, received)
        prefork.offer(prefork.Nearby())
        code = execute(asked["arguments"])
    except BaseException:
        traceback.print_exc()
        code = FAILED
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def take_place(asked: dict[str, Any], received: list[int]) -> None:
    """Standard descriptors, variables, folder, and Python's own files."""
    high = [os.dup(fd) for fd in received]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    for fd in {*high, *received} - {0, 1, 2}:
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in sys.path[1:] if path not in (*given, ROOT)]
    if ROOT not in given and is_installed():
        others.append(ROOT)
    sys.path[:] = [sys.path[0], *given, *others]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = map(stream, range(3))
    gc.enable()


def is_installed() -> bool:
    """Whether Python finds the package without a variable, as `make` installs it."""
    files = [file for folder in site.getsitepackages() for file in Path(folder).glob("*.pth")]
    return any(ROOT in file.read_text().splitlines() for file in files)


def stream(number: int) -> io.TextIOWrapper:
    """Python's file over that descriptor, as it makes it when it starts."""
    name = ("stdin", "stdout", "stderr")[number]
    whole = bool(os.environ.get("PYTHONUNBUFFERED"))  # nothing is held back
    mode = "wb" if number else "rb"
    raw: Any = open(number, mode, 0 if whole and number else -1, closefd=False)  # noqa: SIM115
    like = getattr(sys, name)
    lines = not whole and (number == 2 or os.isatty(number))
    return io.TextIOWrapper(raw, like.encoding, like.errors, None, lines, whole)


def execute(arguments: list[str]) -> int:
    """Runs `-c text`, `-m hoplite_mp ...` or a file, to the end of what Python does at an end."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    if sys.version_info < (3, 14):  # later versions make it when it is first read
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    code: Any
    try:
        if arguments[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
            exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        elif arguments[0] != "-m":
            path = Path(arguments[0])
            sys.argv, sys.path[0] = arguments, str(path.resolve().parent)
            main.__loader__ = SourceFileLoader("__main__", str(path))
            main.__file__ = str(path)
            if sys.version_info < (3, 15):
                main.__dict__.update(__cached__=None)
            code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
            exec(code, main.__dict__)
        else:
            module = importlib.import_module("hoplite_mp.__main__")
            sys.argv = [str(module.__file__), *arguments[2:]]
            sys.exit(module.main())
        code = 0
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1 if not isinstance(error, KeyboardInterrupt) else INTERRUPTED
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return int(code or 0)


def serve(fd: int, *modules: str) -> None:
    """Forks for the parent until it closes its end of this socket."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=fd)
    prefork.import_all((*MODULES, *modules))
    while True:
        data, received, _, _ = socket.recv_fds(line, prefork.MESSAGE_BYTES_MAX, prefork.FDS_MAX)
        if not data:
            return
        pid = prefork.fork_sibling()
        if not pid:
            line.close()
            asked = json.loads(data)
            work = begin if asked["host"] is None else stand_in
            os._exit(work(asked, received))
        for fd in received:
            os.close(fd)
        line.send(str(pid).encode())
