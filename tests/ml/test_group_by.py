"""Models of groups are scikit-learn's on the rows of each group, by every strategy."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

import hoplite_mp
from hoplite_mp import ml
from hoplite_mp.ml import _group_by_strategies, _host_tasks, group_by
from hoplite_mp.ml._group_by_parts import Parts
from hoplite_mp.ml._host_tasks import InlineTasks
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

STRATEGIES = ["accumulate", "data", "task"]
GRID = {"C": [0.1, 10.0]}


@pytest.fixture
def three_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process, but rows are divided as among three hosts."""
    monkeypatch.setattr(group_by, "host_tasks", lambda: _host_tasks.InlineTasks(3))


def table(seed: int = 0, rows: int = 900, columns: int = 4) -> tuple[Any, Any, Any]:
    """Groups of very different sizes; all rows of "flat" are of one class."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns))
    groups = rng.choice(["large", "small", "tiny", "flat"], rows, p=[0.7, 0.2, 0.05, 0.05])
    y = np.where(x @ rng.normal(size=columns) + rng.normal(size=rows) > 0.3, "late", "on time")
    y[groups == "flat"] = "late"
    return x, y, groups


def assert_as_scikit_learn(models: dict[str, Any], x: Any, y: Any, groups: Any) -> None:
    assert set(models) == set(groups)
    for group, found in models.items():
        own = groups == group
        for model in found if isinstance(found, list) else [found]:
            assert model.n_rows_ == own.sum()
            if len(set(y[own])) == 1:
                assert model.classes_.tolist() == [y[own][0]]
                assert not model.coef_.any()
                assert set(model.predict(x)) == {y[own][0]}
                assert model.predict_proba(x[:3]).tolist() == [[1.0]] * 3
                continue
            params = {"C": 1.0} | model.params
            theirs = LogisticRegression(**params, tol=1e-10, max_iter=10_000).fit(x[own], y[own])
            np.testing.assert_allclose(model.coef_, theirs.coef_, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(model.intercept_, theirs.intercept_, rtol=1e-4, atol=1e-5)
            assert model.classes_.tolist() == theirs.classes_.tolist()
            np.testing.assert_allclose(
                model.predict_proba(x), theirs.predict_proba(x), rtol=1e-3, atol=1e-5
            )
            sure = np.abs(model.decision_function(x)) > 1e-3
            assert (model.predict(x) == theirs.predict(x))[sure].all()


@pytest.mark.usefixtures("three_hosts")
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(5, 400), grid=st.sampled_from([None, GRID]))
def test_models_of_any_groups_are_scikit_learns(
    strategy: str, seed: int, rows: int, grid: Any
) -> None:
    x, y, groups = table(seed, rows)
    fitted = ml.GroupBy(ml.Logistic(), grid, strategy).fit(x, y, groups)
    assert_as_scikit_learn(fitted.models_, x, y, groups)
    assert fitted.strategy_ == strategy
    assert fitted.cost_ is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_on_a_cluster_are_scikit_learns(cluster: hoplite_mp.Cluster, strategy: str) -> None:
    x, y, groups = table()
    fitted = ml.GroupBy(ml.Logistic(), GRID, strategy).fit(x, y, groups)
    assert_as_scikit_learn(fitted.models_, x, y, groups)
    before = cluster.stats()["objects"]
    again = ml.GroupBy(ml.Logistic(), GRID, strategy).fit(x, y, groups)
    for group, models in fitted.models_.items():
        for a, b in zip(models, again.models_[group], strict=True):
            assert a.coef_.tobytes() == b.coef_.tobytes()
    eventually(lambda: cluster.stats()["objects"] <= before, "objects are left")


def test_rows_given_as_refs_are_fitted_where_they_are(cluster: hoplite_mp.Cluster) -> None:
    x, y, groups = table()
    parts = [[cluster.put(one[at::3]) for at in range(3)] for one in (x, y, groups)]
    fitted = ml.GroupBy(ml.Logistic(), strategy="accumulate").fit(*parts)
    assert_as_scikit_learn(fitted.models_, x, y, groups)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models_with_a_killed_worker_are_unchanged(
    cluster: hoplite_mp.Cluster, strategy: str
) -> None:
    """A worker dies the first time that it computes sums."""
    x, y, groups = table()

    def die_once() -> None:
        from hoplite_mp.ml import _newton

        def killed(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        _newton.length_of_sums = killed  # type: ignore[assignment]

    lost = cluster.stats()["workers_lost"]
    cluster.run(die_once)
    fitted = ml.GroupBy(ml.Logistic(), strategy=strategy).fit(x, y, groups)
    assert_as_scikit_learn(fitted.models_, x, y, groups)
    assert cluster.stats()["workers_lost"] > lost


@pytest.mark.usefixtures("three_hosts")
def test_auto_takes_the_cheapest_strategy_by_its_estimate() -> None:
    x, y, groups = table()
    fitted = ml.GroupBy(ml.Logistic()).fit(x, y, groups)
    assert fitted.cost_ is not None
    assert set(fitted.cost_) == set(STRATEGIES)
    assert fitted.cost_[fitted.strategy_] == min(fitted.cost_.values())
    assert fitted.cost_["data"] > fitted.cost_["accumulate"]


@pytest.mark.usefixtures("three_hosts")
def test_estimate_with_slow_communication_avoids_what_communicates_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1 s for each communication; then 1 ms for a byte and nothing for a communication."""
    x, y, groups = table()
    for measured, best in (((1.0, 0.0), "task"), ((0.0, 1e-3), "accumulate")):
        monkeypatch.setattr(_group_by_strategies, "_communication", lambda *_, m=measured: m)
        assert ml.GroupBy(ml.Logistic()).fit(x, y, groups).strategy_ == best


def test_model_without_intercept_has_none() -> None:
    x, y, groups = table()
    model = ml.GroupBy(ml.Logistic(fit_intercept=False)).fit(x, y, groups).models_["large"]
    own = groups == "large"
    theirs = LogisticRegression(fit_intercept=False, tol=1e-10, max_iter=10_000)
    np.testing.assert_allclose(model.coef_, theirs.fit(x[own], y[own]).coef_, rtol=1e-4)
    assert model.intercept_.tolist() == [0.0]


def test_models_that_do_not_converge_are_named_in_a_warning() -> None:
    x, y, groups = table()
    with pytest.warns(RuntimeWarning, match="3 of 3 models have not converged after 1 steps"):
        ml.GroupBy(ml.Logistic(max_iter=1)).fit(x, y, groups)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_columns_of_any_scale_converge(scale: float) -> None:
    x, y, groups = table()
    ml.GroupBy(ml.Logistic(C=1e6)).fit(x * scale, y, groups)  # a warning is an error


def test_bad_input_is_one_clear_error(cluster: hoplite_mp.Cluster) -> None:
    x, y, groups = table(rows=30)
    for make, error, message in (
        (lambda: ml.GroupBy("logistic"), TypeError, "must be a Logistic"),
        (lambda: ml.GroupBy(ml.Logistic(), strategy="fast"), ValueError, "no strategy 'fast'"),
        (lambda: ml.GroupBy(ml.Logistic(), {"tol": [1]}), ValueError, "may vary C only"),
        (lambda: ml.Logistic(C=0.0), ValueError, "must be above 0"),
    ):
        with pytest.raises(error, match=message):
            make()
    fit = ml.GroupBy(ml.Logistic()).fit
    for given_, message in (
        ((x, y[1:], groups), "same number of rows"),
        ((x[:, 0], y, groups), "must be"),
        ((np.where(x > 2, np.nan, x) * np.nan, y, groups), "NaN"),
        ((x, np.arange(30), groups), "needs two classes"),
        (([cluster.put(x)], y, groups), "lists of refs"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(*given_)


class _LosesHost(InlineTasks):
    """The second host fails all tasks after the first few, and stays in the list of hosts."""

    def __init__(self, alive: int, error: Exception) -> None:
        super().__init__(2)
        self.left, self.error = alive, error

    def submit(self, host: str, function: Callable[..., Any], *args: Any, priority: int = 0) -> Any:
        self.left -= 1
        if host == "inline1" and self.left < 0:
            future: Future[Any] = Future()
            future.set_exception(self.error)
            return future
        return super().submit(host, function, *args)


LOST = (
    hoplite_mp.NodeLostError("inline1 is lost"),
    hoplite_mp.ObjectLostError("the result was on inline1"),  # its task was done
)


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("alive", range(7))
def test_parts_of_a_host_lost_at_any_task_move_to_another_one(alive: int, error: Exception) -> None:
    rng = np.random.default_rng(0)
    raw = [(rng.normal(size=(50, 2)), np.arange(50) % 2, np.arange(50) % 3) for _ in range(2)]
    parts = Parts(_LosesHost(alive, error), raw, ["inline0", "inline1"], True)
    parts.describe()
    total = parts.sum(lambda rows: np.array([len(rows.x)]))
    assert total == 100
    assert parts.counts.sum() == 100
