"""Clusters whose supervisor is forked from the tests' template are as those of users."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
from typing import TYPE_CHECKING

import psutil

import hoplite_mp
from hoplite_mp._client import launch
from tests.prefork import Forked, Template, preforked

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


# readline sets them in C, where os.environ does not see it.
NOT_SEEN = {"COLUMNS", "LINES"}


def open_files() -> list[str]:
    """What this process has open, without the numbers of pipes, sockets and processes."""
    found = []
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the folder itself
            found.append(re.sub(r"\d+", "", os.readlink(link.path)))
    return sorted(found)


def of_worker() -> dict[str, object]:
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


def test_a_worker_is_as_one_of_an_executed_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "1")
    monkeypatch.chdir(tmp_path)
    with preforked(), hoplite_mp.Cluster(workers=1) as c:
        assert c._host is not None
        assert isinstance(c._host.process, Forked)
        assert psutil.Process(c._host.process.pid).ppid() == os.getpid()
        forked = c.submit(of_worker).result()
    assert forked["environment"]["OF_THIS_TEST"] == "1"
    monkeypatch.setattr(launch, "run_boot", executed)
    with hoplite_mp.Cluster(workers=1) as c:
        assert forked == c.submit(of_worker).result()


def executed(command: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)


def test_what_only_an_execution_takes_over() -> None:
    """A template that was made under other limits is not used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with preforked():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            with hoplite_mp.Cluster(workers=1) as c:
                assert c._host is not None
                assert not isinstance(c._host.process, Forked)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_supervisor_is_heard() -> None:
    template = Template()
    try:
        nothing = os.memfd_create("nothing to do")
        process = template.run(["supervisor"], [nothing])
        os.close(nothing)
        assert process.wait(60) == 1  # it has nothing to read
        assert process.poll() == 1
    finally:
        template.close()
