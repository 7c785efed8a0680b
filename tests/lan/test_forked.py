"""Programs on an emulated host that are forked are as those that are executed."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.lan import Lan, forked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lan import Host

PATIENCE_S = 60.0
ENDS = {
    "nothing": "",
    "words": "print('out'); print('err', file=sys.stderr)",
    "binary": "sys.stdout.buffer.write(bytes(range(256)))",
    "read": "print(sys.stdin.read()[::-1])",
    "code": "sys.exit(3)",
    "text": "sys.exit('a reason')",
    "failure": "print('before'); 1 / 0",
    "interrupt": "signal.raise_signal(signal.SIGINT)",
    "ended": "signal.raise_signal(signal.SIGTERM)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "hard": "print('lost'); os._exit(4)",
    "thread": "import threading; print('early'); threading.Timer(0.2, print, ['late']).start()",
    "atexit": "import atexit; atexit.register(print, 'at last')",
    "last error": "import atexit; atexit.register(lambda: print(repr(sys.last_value))); 1 / 0",
    "forks": "os.fork() or os._exit(0); print(os.wait()[1])",
    "what it is": "print(sys.argv, __name__, os.getcwd(), sys.path[:2], sorted(globals()))",
    "where it is": "import socket; print(socket.gethostname(), sorted(os.listdir('/dev/shm')))",
    "variables": "print(sorted(os.environ.items()))",
    "signals": "print([signal.getsignal(n) for n in (2, 13, 15)],"
    " signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "streams": "print([(s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through)"
    " for s in (sys.stdin, sys.stdout, sys.stderr) if hasattr(s, 'write_through')])",
}
WORKER = """
import os, signal, hoplite_mp
from tests.support.processes import inherited_context
with hoplite_mp.Cluster(workers=1) as c:
    for what, is_ in c.submit(inherited_context).result().items():
        print(what, sorted(is_.items()) if isinstance(is_, dict) else is_)
    print(c.submit(os.getppid).result() > 1, c.submit(lambda: __name__).result())
"""


@pytest.fixture(scope="module")
def host(lan_permitted: None) -> Iterator[Host]:
    with forked.programs(), Lan(1) as lan:
        yield lan[0]


def as_fork_and_executed(host: Host, text: str) -> list[Any]:
    """(exit code, standard output, last line of standard error) of that program, both ways."""
    found = []
    for way in (contextlib.nullcontext, forked.executed):
        with way():
            done = host.run(
                [sys.executable, "-c", text],
                input=b"given",
                capture_output=True,
                timeout=PATIENCE_S,
                env={"HOPLITE_MP_TOKEN": "of this test, and long enough"},
            )
        found.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    return found


@pytest.mark.parametrize("name", ENDS)
def test_a_fork_is_as_what_is_executed(host: Host, name: str) -> None:
    forked_, executed = as_fork_and_executed(host, f"import os, signal, sys\n{ENDS[name]}")
    assert forked_ == executed


SCRIPT = """
import inspect, os, sys
def text(): return 'own'
print(sys.argv[1:], __name__, __file__, os.getcwd(), sys.path, sorted(globals()))
print(type(__loader__).__name__, __loader__.path, inspect.getsource(text))
import beside
raise ZeroDivisionError(beside.NAME)
"""


@pytest.mark.parametrize("arguments", [["program.py"], ["program.py", "-x", "y"], ["-c", "a", "b"]])
def test_script_that_is_forked_is_as_one_that_is_executed(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'n'")
    first = str(tmp_path / arguments[0]) if arguments[0] != "-c" else "-c"
    if first == "-c":
        arguments[1] = "import sys; print(sys.argv, sys.path[0], __name__); sys.exit(4)"
    command = [sys.executable, first, *arguments[1:]]
    found = []
    for way in (forked.programs, forked.executed):
        with way():
            found.append(forked.run(command, cwd=tmp_path, timeout=PATIENCE_S))
    one, other = found
    assert (one.returncode, one.stdout) == (other.returncode, other.stdout)
    assert one.stderr.splitlines()[-3:] == other.stderr.splitlines()[-3:]


def test_its_workers_are_as_those_of_one_that_is_executed(host: Host) -> None:
    forked_, executed = as_fork_and_executed(host, WORKER)
    assert forked_[1].splitlines() == executed[1].splitlines()
    assert forked_ == executed
    assert not forked_[0], forked_[2]


def test_it_is_a_fork(host: Host) -> None:
    """Otherwise the tests above compare nothing."""
    process = host.popen([sys.executable, "-c", "pass"])
    assert isinstance(process, forked.Program)
    assert not process.wait(PATIENCE_S)
    process = host.popen([sys.executable, "-c", "pass"], env={"PYTHONHASHSEED": "7"})
    assert not isinstance(process, forked.Program)
    assert not process.wait(PATIENCE_S)
