"""Training with faulty ranks, and the time of one allreduce by each operator: see `arguments`."""

import statistics
import time

import numpy as np

from examples.applications import our_hosts
from examples.applications.running import arguments, say
from examples.learning.robust import SIZE, data, train
from hoplite_mp import ml
from hoplite_mp._api.cluster import current

OPERATORS = ("mean", "median", "krum", "score")


def times(rank, elements, rounds):
    """Seconds of an allreduce by each operator, on this rank; the operators take turns."""
    x = np.random.default_rng(rank).standard_normal(elements).astype(np.float32)
    v = np.random.default_rng(99).standard_normal(elements).astype(np.float32)
    operators = {
        "mean": "mean",
        "median": ml.Median(),
        "trimmed": ml.TrimmedMean(2),
        "krum": ml.Krum(2),
        "geometric": ml.GeometricMedian(),
        "score": ml.Score(v, lr=0.1, rho=0.0, eps=1e9),
    }
    found = {name: [] for name in operators}
    with current().group("times", SIZE, rank) as group:
        for _ in range(rounds + 1):
            for name, op in operators.items():
                group.barrier()
                begun = time.monotonic()
                group.allreduce(x, op=op)
                found[name].append(time.monotonic() - begun)
    return {name: statistics.median(some[1:]) for name, some in found.items()}


if __name__ == "__main__":
    given = arguments(megabytes=5.0, rounds=9, faults=(0, 3, 5), tls=False)
    with our_hosts.connect(given) as c:
        say("begun")
        elements = int(given.megabytes * 1e6) // 4
        seconds = c.get(c.options(resources={"place": 1}).spmd(times, SIZE, elements, given.rounds))
        accuracy, digits = {}, c.put(data())
        for name in OPERATORS:
            for faulty in given.faults:
                if name == "krum" and faulty > 3:
                    continue  # 5 of 8 is far outside of what Krum(2) may be used for
                futures = c.options(resources={"place": 1}).spmd(train, SIZE, name, faulty, digits)
                accuracy[f"{name} {faulty}"] = c.get(futures)[-1]
        say("ended")
        worst = {name: max(one[name] for one in seconds) for name in seconds[0]}
        say("result", seconds=worst, accuracy=accuracy)
