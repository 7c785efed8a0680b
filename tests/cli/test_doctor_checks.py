"""Each check of `doctor` on hosts that have just the fault that it is there to find."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._cli.doctor import capacity, findings, network, software, trial
from hoplite_mp._cli.doctor.findings import Finding, ok, problem, run, show, summary, warning
from hoplite_mp._client import launch
from hoplite_mp._version import __version__
from hoplite_mp.config import GIB, MIB
from tests.support.transport import InterfaceAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Check = Callable[[], Iterable[Finding]]

TOKEN = "a token for tests, long enough"


def only(found: Iterable[Finding]) -> Finding:
    (finding,) = found
    return finding


def patch(monkeypatch: pytest.MonkeyPatch, where: Any, **values: Any) -> None:
    """Functions that say what a made-up host would."""
    for name, value in values.items():
        monkeypatch.setattr(where, name, lambda value=value: value)


# -- findings ------------------------------------------------------------------------------------


def test_a_row_is_wrapped_and_the_advice_stands_below() -> None:
    text = show(warning("memory", "one two three four five six seven eight", "do this"), 60)
    head, *rest = text.splitlines()
    assert head.startswith("warning  memory ")
    indent = head.index("one")
    assert [line[:indent].strip() for line in rest] == [""] * len(rest)
    assert rest[-1][indent:] == "-> do this"
    assert all(len(line) <= 60 for line in text.splitlines())


def test_what_stands_in_columns_stays() -> None:
    text = show(problem("handshake", "its software does not match:\n  a      b      c"), 50)
    assert text.endswith("  a      b      c")


def test_a_check_that_raises_is_a_problem_and_the_next_one_runs() -> None:
    def broken() -> Iterator[Finding]:
        yield ok("first", "seen")
        raise OSError("no such thing")

    def good() -> list[Finding]:
        return [ok("good", "seen")]

    first, failed, last = run([broken, good])
    assert (first.level, failed.level, last.level) == ("ok", "problem", "ok")
    assert failed.subject == "broken"
    assert "OSError: no such thing" in failed.observation


def test_summary() -> None:
    good, bad, so_so = ok("a", "b"), problem("a", "b"), warning("a", "b", "c")
    assert summary([good]) == "no problems"
    assert summary([good, so_so]) == "no problems, 1 warning"
    assert summary([bad, so_so, bad, so_so]) == "2 problems, 2 warnings"


# -- software, settings --------------------------------------------------------------------------


def test_versions_are_shown_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    good = only(software._software())
    assert good.level == "ok"
    assert f"hoplite_mp {__version__}" in good.observation
    monkeypatch.setattr(software, "_required", lambda: [("numpy", "99.1")])
    old = only(software._software())
    assert old.level == "problem"
    assert re.search(r"numpy [\d.]+ \(at least 99.1\)", old.observation)


def test_a_call_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(software._kernel()).level == "ok"

    def refused(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    found = only(software._kernel())
    assert found.level == "problem"
    assert "pidfd_open: Operation not permitted" in found.observation
    assert "memfd_create:" not in found.observation


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLITE_MP_TOKEN", TOKEN)
    monkeypatch.setenv("HOPLITE_MP_RETRIES", "5")
    good = only(findings._settings())
    assert good == ok("settings", "HOPLITE_MP_RETRIES=5")
    monkeypatch.setenv("HOPLITE_MP_RETRIS", "5")
    unread, _ = findings._settings()
    assert unread.level == "warning"
    assert "HOPLITE_MP_RETRIS" in unread.observation
    monkeypatch.setenv("HOPLITE_MP_RETRIES", "many")
    *_, wrong = findings._settings()
    assert wrong.level == "problem"
    assert "HOPLITE_MP_RETRIES='many'" in wrong.observation
    assert findings.limits().retries == 3


# -- capacity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "count", "level", "words"),
    [
        (float("inf"), 4, "ok", "4 workers"),
        (2.5, 2, "ok", "a quota of 2.5 CPUs"),
        (float("inf"), 1, "warning", "1 worker by default"),
        (0.5, 1, "warning", "a quota of 0.5 CPUs"),
    ],
)
def test_cpus(
    monkeypatch: pytest.MonkeyPatch, quota: float, count: int, level: str, words: str
) -> None:
    patch(monkeypatch, capacity, cpu_quota=quota, cpu_count=count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    found = only(capacity._cpus())
    assert found.level == level
    assert words in found.observation


def test_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capacity, "PROC", tmp_path)
    monkeypatch.setattr(capacity, "CRC_SLOW_BYTES_PER_S", 0)
    monkeypatch.setattr(capacity, "AES_SLOW_BYTES_PER_S", 0)
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2 sse4_2 aes avx2\n")
    good = only(capacity._instructions())
    assert good.level == "ok"
    assert all(float(speed) > 0 for speed in re.findall(r"([\d.]+) GB/s", good.observation))
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2 sse4_2\n")
    lacking = only(capacity._instructions())
    assert lacking.level == "warning"
    assert "lacks aes, avx2" in lacking.observation
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd aes crc32\n")  # no x86: measured only
    assert only(capacity._instructions()).level == "ok"
    monkeypatch.setattr(capacity, "CRC_SLOW_BYTES_PER_S", 1e15)
    assert only(capacity._instructions()).level == "warning"


def test_blas_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, capacity, cpu_count=4)
    for name in capacity.BLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fine = only(capacity._blas())
    assert fine.level == "ok"
    assert "1 in an actor" in fine.observation
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3,2")  # OpenMP allows a list
    assert "12 threads" in only(capacity._blas()).observation
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    many = only(capacity._blas())
    assert many.level == "warning"
    assert "32 threads" in many.observation
    monkeypatch.setenv("HOPLITE_MP_BLAS_THREADS", "1")  # it wins
    assert only(capacity._blas()).level == "ok"


@pytest.mark.parametrize(("hard", "level"), [(40, "problem"), (200, "warning"), (9000, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, level: str) -> None:
    patch(monkeypatch, capacity, cpu_count=4)
    monkeypatch.setattr(capacity.resource, "getrlimit", lambda _: (32, hard))
    assert only(capacity._descriptors()).level == level


@pytest.mark.parametrize(("left", "level"), [(10, "problem"), (50, "warning"), (5000, "ok")])
def test_processes(monkeypatch: pytest.MonkeyPatch, left: int, level: str) -> None:
    patch(monkeypatch, capacity, cpu_count=4, processes_left=(left, "control group"))
    found = only(capacity._processes())
    assert found.level == level
    assert f"{left} more" in found.observation


# -- memory, disk --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "asked", "level"),
    [
        (16 * GIB, 12 * GIB, None, "ok"),
        (16 * GIB, 3 * GIB, None, "warning"),  # less than a third of 16
        (16 * GIB, 100 * MIB, None, "problem"),
        (16 * GIB, 12 * GIB, 20 * GIB, "problem"),
        (16 * GIB, 12 * GIB, 8 * MIB, "warning"),
    ],
)
def test_memory(
    monkeypatch: pytest.MonkeyPatch, total: int, free: int, asked: int | None, level: str
) -> None:
    patch(monkeypatch, capacity, total_bytes=total, available_bytes=free, cgroup_limit=total)
    patch(monkeypatch, launch, total_bytes=total)
    if asked is not None:
        monkeypatch.setenv("HOPLITE_MP_MEMORY_BYTES", str(asked))
    assert only(capacity._memory()).level == level


def test_spilling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch(monkeypatch, capacity, total_bytes=1 * MIB)
    patch(monkeypatch, launch, total_bytes=1 * MIB)
    monkeypatch.setattr(capacity, "is_tmpfs", lambda _: False)
    monkeypatch.setenv("HOPLITE_MP_SPILL_DIR", str(tmp_path))
    good = only(capacity._spilling())
    assert good.level == "ok"
    assert str(tmp_path) in good.observation
    assert list(tmp_path.iterdir()) == []
    patch(monkeypatch, capacity, total_bytes=1 << 60)
    patch(monkeypatch, launch, total_bytes=1 << 60)
    assert only(capacity._spilling()).level == "warning"
    monkeypatch.setenv("HOPLITE_MP_SPILL_BYTES_MAX", "0")
    assert "switched off" in only(capacity._spilling()).observation
    monkeypatch.delenv("HOPLITE_MP_SPILL_BYTES_MAX")
    monkeypatch.setenv("HOPLITE_MP_SPILL_DIR", str(tmp_path / "nowhere"))
    assert only(capacity._spilling()).level == "problem"
    monkeypatch.setenv("HOPLITE_MP_SPILL_DIR", "/proc")  # nobody may write there, not even root
    refused = only(capacity._spilling())
    assert refused.level == "problem"
    assert "cannot write a file in /proc" in refused.observation


def test_spilling_into_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capacity, "is_tmpfs", lambda _: True)
    monkeypatch.setenv("HOPLITE_MP_SPILL_DIR", str(tmp_path))
    found = only(capacity._spilling())
    assert found.level == "warning"
    assert "tmpfs" in found.observation
    monkeypatch.delenv("HOPLITE_MP_SPILL_DIR")
    patch(monkeypatch, capacity, default_directory=None)
    assert "none of TMPDIR" in only(capacity._spilling()).observation


# -- addresses, token, the way to a cluster --------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "known", "netmask", "level"),
    [
        (1024, 20, "255.255.255.0", "ok"),
        (1024, 20, "255.255.240.0", "warning"),
        (1024, 600, "255.255.255.0", "warning"),
        (16384, 600, "255.255.240.0", "ok"),
    ],
)
def test_neighbours_that_could_overflow_the_table_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: int,
    known: int,
    netmask: str,
    level: str,
) -> None:
    (tmp_path / "gc_thresh3").write_text(f"{limit}\n")
    (tmp_path / "arp").write_text("heading\n" + "10.0.0.1 0x1\n" * known)
    monkeypatch.setattr(network, "NEIGHBOURS_MAX", tmp_path / "gc_thresh3")
    monkeypatch.setattr(network, "NEIGHBOURS", tmp_path / "arp")
    entry = InterfaceAddress(socket.AF_INET, "10.0.0.7", netmask)
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: {"eth0": [entry]})
    patch(monkeypatch, network, own_addresses=["10.0.0.7", "fd00::7"])
    found = only(network._neighbours())
    assert found.level == level
    assert ("gc_thresh3=" in found.advice) == (level == "warning")
    monkeypatch.setattr(network, "NEIGHBOURS", tmp_path / "nothing")
    assert not list(network._neighbours())


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, network, own_addresses=["10.0.0.7", "fd00::7"])
    assert only(network._addresses()) == ok("addresses", "10.0.0.7, fd00::7 (best first)")
    patch(monkeypatch, network, own_addresses=[])
    assert only(network._addresses()).level == "warning"


def test_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert only(network._token(None, needed=False)).level == "ok"  # `up` would make one
    assert only(network._token(None, needed=True)).level == "problem"
    assert only(network._token(path, needed=False)).level == "problem"
    path.write_text(TOKEN)
    path.chmod(0o644)
    opened = only(network._token(path, needed=False))
    assert opened.level == "problem"
    assert f"chmod 600 {path}" in opened.observation
    path.chmod(0o600)
    good = only(network._token(path, needed=True))
    assert good.level == "ok"
    assert "mode 0600" in good.observation
    path.write_text("short")
    assert only(network._token(path, needed=True)).level == "problem"


def way(address: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0) -> list[Finding]:
    monkeypatch.setenv("HOPLITE_MP_TOKEN", TOKEN)
    monkeypatch.setenv("HOPLITE_MP_HANDSHAKE_TIMEOUT_S", f"{timeout_s}")
    (check,) = network.checks_of(address, None, tls=False)
    return list(run([check]))


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # it does not listen
        address = address_of(server)
        found = only(way(address, monkeypatch))
    assert (found.level, found.subject) == ("problem", "connection")
    assert found.observation == f"{address}: Connection refused"
    assert "no process listens on this port" in found.advice


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:70000", "no-such-host.invalid:7000"])
def test_no_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(way(address, monkeypatch))
    assert (found.level, found.subject) == ("problem", "name")


def test_somebody_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached, silent = way(address_of(server), monkeypatch, 0.2)
    assert (reached.level, reached.subject) == ("ok", "connection")
    assert (silent.level, silent.subject) == ("problem", "handshake")
    assert "not reply to the handshake" in silent.observation


def test_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A web server, say."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(network.CONNECTS + 1):
                sock, _ = server.accept()
                with sock, contextlib.suppress(ConnectionError):  # some only look who is there
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    while sock.recv(4096):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        _, other = way(address_of(server), monkeypatch)
        thread.join(60)
    assert other.level == "problem"
    assert "does not use the protocol" in other.observation


# -- the trial -----------------------------------------------------------------------------------


def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far it has come by then; that its processes are gone is looked at after each test."""
    body = (
        "import os, signal, sys\nfrom hoplite_mp._cli.doctor import trial\n"
        "trial._calls = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "trial._main(sys.argv[1:])"
    )

    class Stops(subprocess.Popen[str]):
        """A trial that stops when its workers have begun."""

        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([command[0], "-c", body, *command[3:]], **options)

    monkeypatch.setattr(trial.subprocess, "Popen", Stops)
    monkeypatch.setattr(trial, "TRIAL_S_MAX", 0.7)
    *_, last = trial.trial_of_host()()
    assert last.level == "problem"
    assert "was killed after 0.7 s" in last.observation


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLITE_MP_MEMORY_BYTES", "1MiB")
    monkeypatch.setenv("HOPLITE_MP_SMALL_OBJECT_BYTES_MAX", "512KiB")
    *_, last = trial.trial_of_host()()
    assert last.level == "problem"
    assert "failed while starting two workers: ConfigError: memory=1048576" in last.observation


def test_a_trial_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.sys, "executable", "/bin/sh")
    monkeypatch.setattr(
        trial.subprocess, "Popen", _Popen_of('echo \'{"step": "falling"}\'; kill -SEGV $$')
    )
    last = only(trial.trial_of_host()())
    assert last.observation == "failed while falling: SIGSEGV: no error output"


def _Popen_of(script: str) -> Callable[..., Any]:
    real = trial.subprocess.Popen
    return lambda _, **options: real(["/bin/sh", "-c", script], **options)
