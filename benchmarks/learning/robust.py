"""Robust reductions: the accuracy with faulty ranks, and the time of a reduction."""

from __future__ import annotations

from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.learning.experiment import Experiment, Measure, Outcome

HOSTS, MEGABYTES = 8, 5.0
RATES = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
# Accuracy to reach: by the operator and the number of faulty ranks.
TARGETS = {"score 3": 0.94, "median 3": 0.88}
TIMES = {"median": 1.1, "trimmed": 1.1, "krum": 1.2, "geometric": None, "score": 1.2}
PROGRAM = "benchmarks.learning.programs.robust"


def measure(quick: bool) -> Outcome:
    """Times of 5 MB, in turns with the mean; then training on digits by each operator."""
    given = {"megabytes": 0.2 if quick else MEGABYTES, "rounds": 2 if quick else 9}
    if quick:
        given["faults"] = [3]
    seconds, accuracy = {}, {}
    for rate in RATES:
        with Bed("ours", HOSTS, rate=rate) as bed:
            found = run(bed, PROGRAM, given, 900.0)
        seconds[rate] = found["seconds"]
        accuracy |= found["accuracy"]
        given["faults"] = []  # the accuracy does not depend on the links
    measures = [
        Measure(
            f"{name}, links of {RATES[rate]}: time of an allreduce ÷ that of the mean",
            found[name] / found["mean"],
            "ratio of times",
            target,
            at_least=False,
        )
        for rate, found in seconds.items()
        for name, target in TIMES.items()
    ]
    measures += [
        Measure(
            f"{key.split()[0]}, {key.split()[1]} of {HOSTS} ranks faulty",
            value,
            "accuracy",
            TARGETS.get(key),
        )
        for key, value in accuracy.items()
    ]
    return Outcome(
        measures,
        {
            "hosts": HOSTS,
            "bandwidth": " and ".join(RATES.values()),
            "array": f"{given['megabytes']:g} MB of float32",
            "mean": " and ".join(f"{1000 * found['mean']:.0f} ms" for found in seconds.values()),
            "data": "scikit-learn's digits, two layers, batches of 32, 200 steps",
            "faults": "gradients times -5, one rank sends NaN in the second half",
        },
        [
            "The median is arbitrary once half of the ranks are faulty.",
            "Without faults Krum(2) is less accurate than the mean: it uses one gradient of eight.",
            "At 1 Gbit/s the two processors, which eight hosts share, limit the reductions: the "
            "mean takes twice the time that the links need.",
            "Krum(2) tolerates two faulty ranks of eight; three are outside of its guarantee.",
            "With five of eight ranks faulty only the score keeps most of the accuracy.",
        ],
    )


EXPERIMENT = Experiment(
    "robust",
    "Robust reductions",
    "Xie, Koyejo, Gupta: Zeno++, ICML 2020; Blanchard et al.: Krum, NIPS 2017",
    measure,
)
