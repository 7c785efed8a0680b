"""Each order in which the components of a node receive the loss of a host has its reason.

A run holds with the list as it is, and fails when the later component of the pair is moved in front
of the earlier one. All other neighbours are swapped, and not one event of any run changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hoplite_mp._node.runtime.peer_loss import ORDERS, PHASES

ROOT = Path(__file__).resolve().parents[2]
# What shows that an order matters: an aimed run, and a part of what is wrong without the order.
SHOWN_BY = {
    ("recovery", "inbound_tasks"): ("result_of_the_dead", "no other host has a copy"),
    ("recovery", "replicas"): ("replica_of_the_dead", "no other host has a copy"),
    ("recovery", "remote_objects"): ("orphans", "ObjectLostError"),
    ("recovery", "questions"): ("restarts_of_the_dead", "it was started again 0 times"),
    ("remote_objects", "questions"): ("place_of_the_dead", "it is found on a host that is gone"),
}
# Runs in which hosts die: aimed ones, and seeds of random faults.
DEATHS = (
    "abandoned", "asked_of_the_dead", "gaps", "gone_meanwhile", "kept", "moved_twice",
    "ownerless", "part_of_the_dead", "replica_of_the_dead",
    "result_of_the_dead", "second_death", "survives_leader", "tried_again",
    1, 3, 6, 7, 10,
)  # fmt: skip
# `make soak` plays all of them.
DEATHS_IN_SHORT = ("asked_of_the_dead", "gone_meanwhile", "moved_twice", "replica_of_the_dead",
                   "survives_leader", "tried_again", 3, 7)  # fmt: skip
PLAY = """
import json, logging, sys
from hoplite_mp._node.runtime import peer_loss
from hoplite_mp._simulation.runs import run_seed
from tests.aimed import run_aimed

logging.disable(logging.CRITICAL)
found = []
for run, phases in json.load(sys.stdin):
    peer_loss.PHASES = tuple(phases)
    outcome = run_seed(run) if isinstance(run, int) else run_aimed(run, 0)
    found.append((outcome.failure, outcome.digest))
print(json.dumps(found))
"""


def play(runs: list[tuple[str | int, list[str]]]) -> list[tuple[str, str]]:
    """(failure, digest of all events) of these runs, each with that list of phases. They are played
    in a process of their own, as all runs in virtual time."""
    ended = subprocess.run(
        [sys.executable, "-c", PLAY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(runs),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [(failure, digest) for failure, digest in json.loads(ended.stdout)]


def test_peer_loss_phases_swapped_are_detected() -> None:
    assert SHOWN_BY.keys() == ORDERS.keys()
    runs: list[tuple[str | int, list[str]]] = []
    for (earlier, later), (run, _) in SHOWN_BY.items():
        broken = [name for name in PHASES if name != later]
        broken.insert(broken.index(earlier), later)
        runs += [(run, list(PHASES)), (run, broken)]
    failures = [failure for failure, _ in play(runs)]
    for at, (pair, (run, wrong)) in enumerate(SHOWN_BY.items()):
        holds, fails = failures[2 * at : 2 * at + 2]
        assert not holds, run
        assert wrong in fails, (pair, ORDERS[pair])


def swapped(first: int) -> list[str]:
    """The phases after every other pair of neighbours was swapped, without the pairs in ORDERS."""
    phases = list(PHASES)
    for at in range(first, len(PHASES) - 1, 2):
        if PHASES[at : at + 2] not in ORDERS:
            phases[at : at + 2] = phases[at + 1], phases[at]
    return phases


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(DEATHS_IN_SHORT, id="in short"),
        pytest.param(DEATHS, marks=[pytest.mark.soak, pytest.mark.timeout(600)], id="all"),
    ],
)
def test_peer_loss_other_phases_swapped_hold(deaths: tuple[str | int, ...]) -> None:
    for earlier, later in pairwise(PHASES):
        both = [swapped(first).index(earlier) > swapped(first).index(later) for first in (0, 1)]
        assert sum(both) == ((earlier, later) not in ORDERS), (earlier, later)
    lists = [list(PHASES), swapped(0), swapped(1)]
    found = play([(run, phases) for run in deaths for phases in lists])
    for at, run in enumerate(deaths):
        as_it_is, *others = found[3 * at : 3 * at + 3]
        assert not as_it_is[0], run
        assert others == [as_it_is] * 2, run
