"""Clusters whose supervisor is forked from the tests' template are as those of users."""

from __future__ import annotations

import os
import resource
import subprocess
from typing import TYPE_CHECKING

import psutil

import hoplite_mp
from hoplite_mp._client import launch
from tests.prefork import Forked, Template, preforked
from tests.support.processes import inherited_context

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_worker_is_as_one_of_an_executed_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "1")
    monkeypatch.chdir(tmp_path)
    with preforked(), hoplite_mp.Cluster(workers=1) as c:
        assert c._host is not None
        assert isinstance(c._host.process, Forked)
        assert psutil.Process(c._host.process.pid).ppid() == os.getpid()
        forked = c.submit(inherited_context).result()
    assert forked["environment"]["OF_THIS_TEST"] == "1"
    monkeypatch.setattr(launch, "run_boot", executed)
    with hoplite_mp.Cluster(workers=1) as c:
        assert forked == c.submit(inherited_context).result()


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
