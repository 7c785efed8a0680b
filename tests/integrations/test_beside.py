"""Taking part beside another engine, without one: how a process finds its way back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import hoplite_mp
from hoplite_mp.integrations._sidecar import sidecar

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
# A process whose node is killed while the system has no memory for another process.
MEMBER = """
import os, pickle, signal, subprocess, sys, time
import hoplite_mp
from hoplite_mp.integrations._sidecar import sidecar as beside
place = pickle.loads(sys.stdin.buffer.read())
member = beside.take_part(place)
cluster, node = member.cluster, member.cluster._runtime.tasks.pid(0)
began = subprocess.Popen
refused = []
def popen(*args, **kwargs):
    if not refused:
        refused.append(args)
        raise OSError(12, "Cannot allocate memory")
    return began(*args, **kwargs)
subprocess.Popen = popen
os.kill(node, signal.SIGKILL)
deadline = time.monotonic() + 30
while member.cluster is cluster and member.lost is None and time.monotonic() < deadline:
    time.sleep(0.05)
print(len(refused), member.lost, member.cluster is cluster)
print(beside.take_part(place).cluster.get(member.cluster.put(7)))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sidecar.Place:
    """A cluster that begins with this process, whose node others do not find."""
    (tmp_path / "here").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "here"))
    return sidecar.begin("127.0.0.1:0", memory="64MiB")


def test_a_process_enters_again_after_the_system_has_refused_one(
    place: sidecar.Place, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o700)
    member = sidecar.member_of(place)
    assert member is not None
    try:
        ran = subprocess.run(
            [sys.executable, "-c", MEMBER],
            input=pickle.dumps(place),
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "XDG_RUNTIME_DIR": str(there),
                "TMPDIR": str(there),
            },
            timeout=PATIENCE_S,
            check=True,
        )
        assert ran.stdout.decode().splitlines() == ["1 None False", "7"]
    finally:
        member.end()


def test_current_after_a_member_enters_again_stays_the_cluster_opened_later(
    place: sidecar.Place,
) -> None:
    """The membership that returns keeps its position in the order of opening."""
    member = sidecar.member_of(place)
    assert member is not None
    try:
        with hoplite_mp.Cluster(workers=1) as later:
            again = sidecar._Attached(address=place.address, **place.options)
            assert hoplite_mp.current() is again
            again._runtime.replace(member.cluster._runtime)
            assert hoplite_mp.current() is later
            again.shutdown()
        assert hoplite_mp.current() is member.cluster
    finally:
        member.end()
