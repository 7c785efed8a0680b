"""Gossip over links that change, beside allreduce, and the case where allreduce wins."""

from __future__ import annotations

import itertools
import random
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTS, RATE, NARROW = 8, "100mbit", "2mbit"
SLOW_PAIRS = 6  # of 28, other ones after each interval
CHANGE_S = 10.0
DEADLINE_S = 0.15
SECONDS, EQUAL_SECONDS, QUICK_SECONDS = 40.0, 20.0, 4.0
WAYS = {
    "reliable": "gossip, reliable links",
    "ring": "gossip, ring",
    "random": "gossip, random pairs",
    "allreduce": "allreduce",
}
LEVEL = 0.80
PROGRAM = "benchmarks.learning.programs.gossip"


class Links:
    """Paths between pairs of hosts, some of which are narrow for a while."""

    def __init__(self, bed: Bed) -> None:
        self._lan = bed.lan
        self._narrow: list[tuple[int, int]] = []
        for to, source in itertools.permutations(range(HOSTS), 2):
            self._lan[to].narrow(self._lan[source], RATE)

    def change(self, pairs: list[tuple[int, int]]) -> None:
        """These pairs are narrow from now on, all others as wide as the links."""
        for rate, some in ((RATE, self._narrow), (NARROW, pairs)):
            for a, b in some:
                self._set(a, b, rate)
                self._set(b, a, rate)
        self._narrow = pairs

    def _set(self, to: int, source: int, rate: str) -> None:
        port = f"port{self._lan[to].number}"
        leaf = f"1:{self._lan[source].number + 1:x}"
        change = ("class", "change", "dev", port, "parent", "1:ff", "classid", leaf)
        limit = ("htb", "rate", rate, "ceil", rate, "burst", "16kb", "quantum", "65536")
        command = self._lan.enter("tc", *change, *limit)
        subprocess.run(command, check=True, capture_output=True)

    def keep_changing(self, ended: threading.Event) -> None:
        """Other pairs after each interval; the same ones in each run."""
        rng = random.Random(0)
        pairs = list(itertools.combinations(range(HOSTS), 2))
        while not ended.is_set():
            self.change(rng.sample(pairs, SLOW_PAIRS))
            ended.wait(CHANGE_S)
        self.change([])


def reached(curve: Sequence[Sequence[float]], level: float) -> float:
    """Seconds until the accuracy is first at that level; inf if it never is."""
    return next((seconds for seconds, value in curve if value >= level), float("inf"))


def runs(quick: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """The results, by links and way."""
    found = {}
    with Bed("ours", HOSTS, rate=RATE) as bed:
        links = Links(bed)
        for kind, ways in (("equal", ("reliable", "allreduce")), ("changing", tuple(WAYS))):
            for way in ways:
                seconds = EQUAL_SECONDS if kind == "equal" else SECONDS
                given = {
                    "way": way,
                    "deadline": DEADLINE_S,
                    "seconds": QUICK_SECONDS if quick else seconds,
                }
                ended = threading.Event()
                changes = threading.Thread(target=links.keep_changing, args=(ended,))
                if kind == "changing":
                    changes.start()
                try:
                    found[kind, way] = run(bed, PROGRAM, given, 180.0)
                finally:
                    ended.set()
                    if kind == "changing":
                        changes.join()
    return found


def measure(quick: bool) -> Outcome:
    """Seconds to an accuracy, with links that change and with equal ones."""
    found = runs(quick)
    times = {key: reached(one["curve"], LEVEL) for key, one in found.items()}
    ours = times["changing", "reliable"]
    measures = [
        Measure(
            f"changing links: {WAYS[way]} ÷ reliable, time to {LEVEL:.0%}",
            times["changing", way] / ours, "ratio of times (others / ours)",
        )
        for way in ("allreduce", "ring", "random")
    ]  # fmt: skip
    measures += [
        Measure(
            f"equal links: allreduce ÷ reliable, time to {LEVEL:.0%}",
            times["equal", "allreduce"] / times["equal", "reliable"],
            "ratio of times (others / ours)",
        ),
        *(
            Measure(
                f"{kind} links: {WAYS[way]}",
                one["rounds"] / one["usage"]["seconds"],
                "rounds/s",
            )
            for (kind, way), one in found.items()
        ),
    ]
    return Outcome(
        measures,
        {
            "data": "Fashion-MNIST", "model": "784-100-10, float32",
            "bytes of the model": found["equal", "reliable"]["bytes"],
            "hosts": HOSTS, "bandwidth": RATE, "batch": "4 steps of 64 a round and host",
            "narrow": f"{SLOW_PAIRS} of 28 paths at {NARROW}, other ones every {CHANGE_S:g} s",
            "deadline": f"{DEADLINE_S:g} s", "seed": 0,
        },
        [
            "The accuracy is that of rank 0; models of gossip differ from each other.",
        ],
        [Line(WAYS[way], found["changing", way]["curve"]) for way in WAYS],
        "s",
        "accuracy of rank 0",
    )  # fmt: skip


EXPERIMENT = Experiment(
    "gossip",
    "Gossip over links that change",
    "MATCHA 2019, RoADTrain: less time for communication at equal loss",
    measure,
)
