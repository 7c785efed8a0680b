"""Program of the experiment `group_by`: a model of late arrivals for each group of flights.

Each host reads its own share of the rows; the models are fitted where these are.
"""

import functools

import numpy as np

from examples.applications.nycflights import load
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say
from hoplite_mp import ml

CHECKED = 8  # groups whose coefficients are compared with scikit-learn's


@functools.cache
def flights(group):
    """Read once in each worker."""
    return load(group)


def share(what, group, rows, at, of):
    """One of the three arrays of a host's rows."""
    chosen = np.random.default_rng(0).permutation(len(flights(group)[0]))[:rows]
    return flights(group)[what][chosen[at::of]]


def largest_difference(models, table, grid):
    """Between our coefficients and scikit-learn's, in groups of all sizes."""
    from sklearn.linear_model import LogisticRegression

    x, late, groups = table
    names = sorted(models, key=lambda name: -models[name][0].n_rows_)
    found = 0.0
    for name in names[:: max(1, len(names) // CHECKED)]:
        for model in models[name]:
            if len(model.classes_) == 2:
                own = groups == name
                theirs = LogisticRegression(C=model.params["C"], tol=1e-9, max_iter=10_000)
                theirs.fit(x[own], late[own])
                found = max(found, float(np.abs(theirs.coef_ - model.coef_).max()))
    return found


def main(given, cluster):
    hosts = [node for node in cluster.nodes if node.workers]
    parts = [
        [
            cluster.options(node=node).submit(share, what, given.group, given.rows, at, len(hosts))
            for at, node in enumerate(hosts)
        ]
        for what in range(3)
    ]
    cluster.wait([future for part in parts for future in part])
    grid = {"C": given.strengths}
    warm = [[cluster.put(one.result()[:50]) for one in part] for part in parts]
    ml.GroupBy(ml.Logistic(max_iter=50), grid, "task").fit(
        *warm
    )  # makes the workers import scikit-learn
    say("begun")
    fitted = ml.GroupBy(ml.Logistic(), grid, given.strategy).fit(*parts)
    say("ended")
    table = [np.concatenate([one.result() for one in part]) for part in parts]
    sizes = [models[0].n_rows_ for models in fitted.models_.values()]
    say(
        "result", strategy=fitted.strategy_, cost=fitted.cost_, groups=len(sizes),
        largest=max(sizes), smallest=min(sizes), models=sum(map(len, fitted.models_.values())),
        iterations=max(one.n_iter_ for models in fitted.models_.values() for one in models),
        difference=largest_difference(fitted.models_, table, grid) if given.check else 0.0,
    )  # fmt: skip


if __name__ == "__main__":
    given = arguments(
        group="carrier", strategy="auto", rows=400_000, strengths=[0.01, 0.1, 1.0, 10.0],
        check=False, tls=False,
    )  # fmt: skip
    with connect(given) as c:
        main(given, c)
