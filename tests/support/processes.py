"""Programs and processes that tests start, inspect and wait for."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hoplite_mp import _serialize
from tests.lan import forked
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp import Cluster


GONE_S = PATIENCE_S
STILL_S = 0.05


def host_of(cluster: Cluster) -> psutil.Process:
    """The supervisor, whose children all others are."""
    host = cluster._host
    assert host is not None
    return psutil.Process(host.process.pid)


def at_rest(cluster: Cluster, workers: int | None = None) -> None:
    """Returns when the processes of a cluster have nothing left to do, and so many workers are up:
    no process runs, or waits for a processor, and none has come, gone or computed between two
    looks. Until then a count of processes, descriptors or objects is that of a moment."""
    supervisor = host_of(cluster)
    cluster.stats()  # the node has begun

    def look() -> list[Any]:
        found: list[Any] = []
        for one in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((one, one.name(), one.status(), one.cpu_times()[:2], one.num_fds()))
        return found

    def quiet() -> bool:
        before = look()
        names = [name for _, name, *_ in before]
        if workers is not None and names.count("hoplite worker") != workers:
            return False
        if names.count("hoplite node") != 1 or names.count("hoplite manager") != 1:
            return False
        time.sleep(STILL_S)
        return before == look() and {status for _, _, status, *_ in before} == {"sleeping"}

    eventually(quiet)


HEAD = """
import os, signal, subprocess, sys, threading, time
import numpy as np, psutil
import hoplite_mp

def family():
    return psutil.Process().children(recursive=True)
def say(*words):
    print(*words, flush=True)
"""


class Program:
    """A script in a process of its own (see tests/lan/forked.py), and what it has started."""

    def __init__(self, body: str, *arguments: str, cwd: Path | None = None, **env: str) -> None:
        self.process = forked.popen(
            [sys.executable, *arguments, "-c", HEAD + textwrap.dedent(body)],
            {**os.environ, "PYTHONUNBUFFERED": "", **env},
            cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.family: set[psutil.Process] = set()

    def line(self) -> str:
        """The next line of its stdout; its processes so far are remembered."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline().strip()
        if self.process.poll() is None:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return text

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, code: int | None = 0, within: float = 40.0) -> tuple[str, str]:
        """Waits for its end; nothing that was seen of it is left. Returns stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=within)
        finally:
            self.process.kill()
            self.process.wait()
        gone(self.family)
        if code is not None:
            assert self.process.returncode == code, err
        return out, err


def gone(processes: Iterable[psutil.Process]) -> None:
    """All of them have ended within GONE_S."""
    _, alive = psutil.wait_procs(list(processes), timeout=GONE_S)
    assert not alive, alive


def run_program(body: str, code: int | None = 0, cwd: Path | None = None, **env: str) -> str:
    """A script from beginning to end; returns its stdout."""
    return Program(body, cwd=cwd, **env).end(code)[0]


def processes_named(name: str) -> list[psutil.Process]:
    """Processes of this one's clusters."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name() == name and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_script(folder: Path, text: str, **env: str) -> str:
    """Runs the text as a file `program.py`; returns its stdout."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    done = forked.run([sys.executable, str(path)], env={**os.environ, **env}, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


ROOT = Path(_serialize.__file__).parents[2]


def run_python(source: str, *args: Any) -> str:
    """Run `source` as a `__main__` of its own."""
    done = forked.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fork_child(run: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.__stderr__, flush=True)
    finally:
        os._exit(code)


def exit_code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def exit_code_in_child(run: Callable[[], None]) -> int:
    """Of a forked child that does this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            run()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.__stderr__, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# readline sets them in C, where os.environ does not see it.
NOT_SEEN = {"COLUMNS", "LINES"}


def open_files() -> list[str]:
    """What this process has open, without the numbers of pipes, sockets and processes."""
    found = []
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the folder itself
            found.append(re.sub(r"\d+", "", os.readlink(link.path)))
    return sorted(found)


def inherited_context() -> dict[str, object]:
    """What a worker has from the process that its supervisor was started by."""
    return {
        "environment": {k: v for k, v in os.environ.items() if k not in NOT_SEEN},
        "folder": os.getcwd(),
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "interrupt": signal.getsignal(signal.SIGINT),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cores": os.sched_getaffinity(0),
        "files": open_files(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "umask": [os.umask(0o22), os.umask(0o22)],
    }
