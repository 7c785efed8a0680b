"""A grid search of scikit-learn in a new process, repeated.

    python joblib_search.py BACKEND ROUNDS

Prints JSON: `cold`, the seconds from before the import of the backend to the end of the first
search, and `warm`, those of each later one.
"""

import json
import sys
import time

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

GRID = {"C": [0.1, 1, 10], "gamma": [1e-4, 1e-3, 1e-2]}


def main() -> None:
    """Everything that both need is imported and loaded before the clock starts."""
    backend, rounds = sys.argv[1], int(sys.argv[2])
    x, y = load_digits(return_X_y=True)
    SVC().fit(x[:50], y[:50])
    times, scores = [], []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        if backend == "hoplite_mp":
            import hoplite_mp.integrations.joblib  # noqa: F401
        with joblib.parallel_config(backend=backend, n_jobs=2):
            search = GridSearchCV(SVC(), GRID, cv=3).fit(x, y)
        times.append(time.perf_counter() - began)
        scores.append(search.cv_results_["mean_test_score"])
    assert all(np.array_equal(scores[0], other) for other in scores)
    print(json.dumps({"cold": times[0], "warm": times[1:], "best": search.best_score_}))


if __name__ == "__main__":
    main()
