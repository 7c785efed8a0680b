"""A cluster whose manager no process of an engine has: it outlives who has begun it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._client.open_cluster import NoNodeHere
from hoplite_mp._transport.rendezvous import Sole
from hoplite_mp.integrations._sidecar import sidecar
from tests.support.clusters import PATIENCE_S, ROOT

BEGINS = """
import contextlib, dataclasses, json, os, signal, sys
import hoplite_mp
from hoplite_mp.integrations._sidecar import sidecar as beside
member = None
while member is None:  # a machine that stood still may have left the node unused for too long
    with contextlib.suppress(hoplite_mp.HopliteError):
        place = beside.begin_kept(
            "127.0.0.1:0", memory="64MiB", tls=False, node_idle_s=float(sys.argv[1])
        )
        member = beside.take_part(place, 5.0)
        member.cluster.put(1)
print(json.dumps(dataclasses.asdict(place)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


IDLE_S = 3.0  # mostly longer than a busy machine takes to let the first one take part


def begun(idle_s: float) -> sidecar.Place:
    """By a process that is killed then."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINS, str(idle_s)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == -signal.SIGKILL
    told = json.loads(done.stdout)
    return sidecar.Place(**{**told, "config": hoplite_mp.Config(**told["config"])})


def until_gone(place: sidecar.Place) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while sidecar.is_kept(place):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def looking() -> list[str]:
    """The threads of this process that would look for another node."""
    return [one.name for one in threading.enumerate() if one.name == "hoplite_mp beside"]


def test_it_goes_on_without_who_has_begun_it() -> None:
    place = begun(60.0)
    assert sidecar.is_kept(place)
    member = sidecar.take_part(place)
    c = member.cluster
    ref = c.put(np.ones(100_000))
    view = c.get(ref)
    assert c.nodes[0].workers == 0
    assert sidecar.take_part(place) is member
    sidecar.end_kept(place)
    assert not sidecar.is_kept(place)
    sidecar.end_kept(place)  # no effect
    assert c._host is not None
    assert c._host.ended.wait(PATIENCE_S)
    with pytest.raises(hoplite_mp.NodeLostError):
        c.put(1)
    assert view.sum() == 100_000
    member.end()
    assert looking() == []


def test_nobody_uses_it() -> None:
    place = begun(IDLE_S)
    until_gone(place)
    with pytest.raises(hoplite_mp.ManagerLostError):
        sidecar.take_part(place, 0.5)


def test_its_keeper_is_killed() -> None:
    place = begun(60.0)
    member = sidecar.take_part(place)
    pid = Sole.holder(sidecar.lock_name(place))
    assert pid
    os.kill(pid, signal.SIGKILL)
    until_gone(place)
    host = member.cluster._host
    assert host is not None
    assert host.ended.wait(PATIENCE_S)
    # Who waits for the way back hears that there is none, or what calls then raise.
    with pytest.raises((hoplite_mp.NodeLostError, hoplite_mp.ManagerLostError)):
        sidecar.take_part(place, 0.1).cluster.put(1)
    member.end()
    assert looking() == []


def test_who_has_left_looks_for_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back leads through a sidecar, which answers nothing here for a long time."""
    place = begun(60.0)
    member = sidecar.take_part(place)
    looked = threading.Event()

    def nobody_here(**_: object) -> hoplite_mp.Cluster:
        looked.set()
        raise NoNodeHere

    monkeypatch.setattr(sidecar, "_Attached", nobody_here)
    silent = (
        "import os, select; os.fork() and os._exit(0); poll = select.poll(); "
        "poll.register(1, 0); poll.poll(100_000)"  # until nobody reads its output any more
    )
    monkeypatch.setattr(sidecar, "BOOT", silent)
    pid = Sole.holder(sidecar.lock_name(place))
    assert pid
    os.kill(pid, signal.SIGKILL)
    assert looked.wait(PATIENCE_S)
    began = time.monotonic()
    member.end()
    assert looking() == []
    assert time.monotonic() - began < 40, "it has waited for the sidecar"


def test_the_address_is_taken() -> None:
    place = begun(60.0)
    with pytest.raises(hoplite_mp.ConfigError):
        sidecar.begin_kept(place.address, tls=False)
    sidecar.end_kept(place)
