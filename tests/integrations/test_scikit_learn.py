"""scikit-learn on our workers, by joblib's backend: the same numbers as without any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config

import hoplite_mp.integrations.joblib as ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True, scope="module")
def workers() -> Iterator[None]:
    with parallel_config(backend="hoplite_mp", n_jobs=2):
        Parallel()(delayed(abs)(n) for n in range(4))
    yield
    ours.shutdown()


@pytest.fixture(autouse=True)
def with_ours(workers: None) -> Iterator[None]:
    with parallel_config(backend="hoplite_mp", n_jobs=2):
        yield


def searched() -> Any:
    from sklearn.datasets import load_iris
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    x, y = load_iris(return_X_y=True)
    forest = RandomForestClassifier(8, random_state=0, n_jobs=2)
    search = GridSearchCV(forest, {"max_depth": [1, 3]}, cv=2, n_jobs=2).fit(x, y)
    return search.cv_results_["mean_test_score"], search.predict(x)


def forest_of() -> Any:
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier

    x, y = make_classification(3000, 60, random_state=0)  # 1.4 MB: lent
    with parallel_config(max_nbytes=100_000):
        forest = RandomForestClassifier(6, random_state=0, n_jobs=2).fit(x, y)
    forest.set_params(n_jobs=1)  # threads add their probabilities up in any order
    return forest.predict_proba(x[:50]), forest.feature_importances_


def scored() -> Any:
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score

    x, y = load_iris(return_X_y=True)
    return (cross_val_score(LogisticRegression(max_iter=500), x, y, cv=4, n_jobs=2),)


@pytest.mark.parametrize("program", [searched, forest_of, scored])
def test_scikit_learn_gives_the_same(program: Callable[[], Any]) -> None:
    found = program()
    with parallel_config(backend="sequential"):
        expected = program()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
