"""How do I cluster rows without waiting for whole passes over them?

K-means on the handwritten digits of scikit-learn, on all cores. The centres move many times in each
pass; `period=None` moves them once in a pass, as in Lloyd's algorithm.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

import hoplite_mp
from hoplite_mp import ml


def main():
    digits, labels = load_digits(return_X_y=True)
    first = digits[np.random.default_rng(0).choice(len(digits), 10, replace=False)]
    with hoplite_mp.Cluster(workers=2) as c:
        for period in (None, "auto"):
            before = c.stats()["bytes_sent"]
            model = ml.KMeans(10, init=first, period=period, block=64).fit(digits)
            found = model.result_
            sent = c.stats()["bytes_sent"] - before
            print(
                f"period {period}: mean squared distance {model.inertia_ / len(digits):.1f} after "
                f"{found.passes:.1f} passes with {found.rounds} updates; "
                f"agreement with the true digits {adjusted_rand_score(labels, model.labels_):.2f}; "
                f"{sent} bytes over the network"
            )


if __name__ == "__main__":
    main()
