"""Decision trees are scikit-learn's wherever the best split is unique, on any number of hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sklearn.ensemble
import sklearn.tree
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

import hoplite_mp
from hoplite_mp import ml
from hoplite_mp.ml import _host_tasks, decision_trees
from tests.prefork import preforked
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

EQUIVALENCE = "check_sample_weight_equivalence_on_dense_data"
# As in scikit-learn's own list for its RandomForestClassifier.
DRAWN_ROWS = {EQUIVALENCE: "rows are drawn at random, and a weight counts for each row"}
EQUAL_GAINS = {EQUIVALENCE: "which of two splits of equal gain is taken depends on the rows"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    """Its workers find what each of them would import for seconds."""
    with (
        preforked(modules=["hoplite_mp.ml._tree_tasks"]),
        hoplite_mp.Cluster(workers=3, memory="256MiB") as made,
    ):
        yield made


@pytest.fixture
def three_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process, but columns are divided as among three hosts."""
    monkeypatch.setattr(decision_trees, "host_tasks", lambda: _host_tasks.InlineTasks(3))


def gain(tree: Any, node: int) -> float:
    """Weighted decrease of the impurity by a node's split; 0 at a leaf."""
    left, right = tree.children_left[node], tree.children_right[node]
    if left < 0:
        return 0.0
    parts = [tree.weighted_n_node_samples[at] * tree.impurity[at] for at in (node, left, right)]
    return float(parts[0] - parts[1] - parts[2])


def assert_same_tree(ours: Any, theirs: Any) -> int:
    """Down to nodes at which both took different splits of equal gain; returns how many nodes."""
    pairs, count = [(0, 0)], 0
    while pairs:
        a, b = pairs.pop()
        count += 1
        assert ours.n_node_samples[a] == theirs.n_node_samples[b]
        assert ours.impurity[a] == pytest.approx(theirs.impurity[b], rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(ours.value[a], theirs.value[b], rtol=1e-9, atol=1e-12)
        split = ours.feature[a], ours.threshold[a]
        if split != (theirs.feature[b], theirs.threshold[b]):
            assert gain(ours, a) == pytest.approx(gain(theirs, b), rel=1e-9, abs=1e-9)
        elif ours.children_left[a] >= 0:
            pairs.append((ours.children_left[a], theirs.children_left[b]))
            pairs.append((ours.children_right[a], theirs.children_right[b]))
    return count


def assert_equal_trees(ours: Any, theirs: Any) -> None:
    """The arrays of both trees are the same."""
    for name in ("feature", "threshold", "children_left", "children_right", "n_node_samples"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-9)


@pytest.mark.usefixtures("three_hosts")
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(2, 120),
    columns=st.integers(1, 6),
    levels=st.sampled_from([3, 50, 10**6]),
    classes=st.integers(2, 4),
    weighted=st.booleans(),
    params=st.fixed_dictionaries(
        {
            "criterion": st.sampled_from(["gini", "entropy"]),
            "max_depth": st.sampled_from([None, 1, 3]),
            "min_samples_leaf": st.sampled_from([1, 4, 0.1]),
            "min_samples_split": st.sampled_from([2, 10, 0.2]),
            "min_weight_fraction_leaf": st.sampled_from([0.0, 0.05]),
            "min_impurity_decrease": st.sampled_from([0.0, 0.01]),
            "class_weight": st.sampled_from([None, {0: 2.0}]),
        }
    ),
    subtree_rows=st.sampled_from([1, 20, 1000]),
    replicas=st.integers(1, 3),
)
def test_classifier_on_any_data_equals_scikit_learns(
    seed: int, rows: int, columns: int, levels: int, classes: int, weighted: bool,
    params: dict[str, Any], subtree_rows: int, replicas: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels, (rows, columns)) / 7
    y = rng.integers(0, classes, rows)
    y[0] = 0  # which class_weight names
    weights = rng.integers(0, 4, rows).astype(float) if weighted else None
    if weights is not None:
        weights[0] = 1.0
    theirs = sklearn.tree.DecisionTreeClassifier(**params).fit(x, y, weights)
    own = ml.DecisionTreeClassifier(**params, subtree_rows=subtree_rows, replicas=replicas)
    ours = own.fit(x, y, weights)
    assert_same_tree(ours.tree_, theirs.tree_)
    assert ours.classes_.tolist() == theirs.classes_.tolist()


@pytest.mark.usefixtures("three_hosts")
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(2, 100),
    criterion=st.sampled_from(["squared_error", "absolute_error"]),
    max_depth=st.sampled_from([None, 3]),
    subtree_rows=st.sampled_from([1, 20]),
)
def test_regressor_on_any_data_equals_scikit_learns(
    seed: int, rows: int, criterion: str, max_depth: int | None, subtree_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4))
    y = rng.integers(-9, 9, rows) + 0.5
    params = {"criterion": criterion, "max_depth": max_depth, "min_samples_leaf": 3}
    theirs = sklearn.tree.DecisionTreeRegressor(**params).fit(x, y)
    ours = ml.DecisionTreeRegressor(**params, subtree_rows=subtree_rows).fit(x, y)
    assert_same_tree(ours.tree_, theirs.tree_)


def test_tree_on_a_cluster_equals_scikit_learns_node_for_node(cluster: hoplite_mp.Cluster) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6000, 6))
    y = x[:, 0] + np.sin(3 * x[:, 1]) + rng.normal(size=6000)
    params = {"max_depth": 7, "min_samples_leaf": 50}  # large leaves: no two splits are equal
    before = cluster.stats()["tasks_done"]
    ours = ml.DecisionTreeRegressor(**params, subtree_rows=800).fit(x, y)
    assert cluster.stats()["tasks_done"] > before + 10
    theirs = sklearn.tree.DecisionTreeRegressor(**params).fit(x, y)
    assert_equal_trees(ours.tree_, theirs.tree_)
    np.testing.assert_array_equal(ours.apply(x), theirs.apply(x))
    np.testing.assert_allclose(ours.feature_importances_, theirs.feature_importances_)


def test_tree_after_fit_leaves_no_objects(cluster: hoplite_mp.Cluster) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    model = ml.DecisionTreeClassifier(subtree_rows=100, random_state=0)
    model.fit(x, y)  # functions and classes stay
    before = cluster.stats()["objects"]
    model.fit(x, y)
    eventually(lambda: cluster.stats()["objects"] <= before, "objects are left")


def test_tree_with_killed_workers_is_unchanged(cluster: hoplite_mp.Cluster) -> None:
    """A worker dies in the middle of each of its first tasks."""
    x, y = load_breast_cancer(return_X_y=True)
    model = ml.DecisionTreeClassifier(subtree_rows=50, random_state=3)
    undisturbed = model.fit(x, y).tree_

    def die_soon() -> None:
        import os
        import signal

        from hoplite_mp.ml import _tree_tasks

        plain = _tree_tasks.Rules.build

        def build(self: Any, *args: Any, **more: Any) -> Any:
            plain(self, *args, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        _tree_tasks.Rules.build = build  # type: ignore[method-assign]

    lost = cluster.stats()["workers_lost"]
    cluster.run(die_soon)
    assert_equal_trees(clone(model).fit(x, y).tree_, undisturbed)
    assert cluster.stats()["workers_lost"] >= lost + 1


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_random_state_on_any_number_of_hosts_gives_the_same_trees(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = load_digits(return_X_y=True)
    model = ml.RandomForestClassifier(4, random_state=5, subtree_rows=300)
    alone = clone(model).fit(x, y)
    monkeypatch.setattr(decision_trees, "host_tasks", lambda: _host_tasks.InlineTasks(hosts))
    several = clone(model).set_params(replicas=1).fit(x, y)
    for a, b in zip(alone.estimators_, several.estimators_, strict=True):
        assert_equal_trees(a.tree_, b.tree_)


def test_random_trees_are_as_accurate_as_scikit_learns() -> None:
    x, y = load_digits(return_X_y=True)
    ours = ml.RandomForestClassifier(40, random_state=0, subtree_rows=500)
    theirs = sklearn.ensemble.RandomForestClassifier(40, random_state=0)
    both = [cross_val_score(model, x, y, cv=3).mean() for model in (ours, theirs)]
    assert both[0] > both[1] - 0.015


@pytest.mark.parametrize(
    ("estimator", "failing"),
    [
        (ml.DecisionTreeClassifier(), {}),
        (ml.DecisionTreeClassifier(subtree_rows=5), EQUAL_GAINS),
        (ml.DecisionTreeRegressor(), {}),
        (ml.RandomForestClassifier(n_estimators=5), DRAWN_ROWS),
    ],
    ids=["classifier", "column tasks", "regressor", "random trees"],
)
def test_check_estimator_passes(estimator: Any, failing: dict[str, str]) -> None:
    found = check_estimator(estimator, expected_failed_checks=failing, on_skip=None)
    assert len(found) > 40


@pytest.mark.parametrize(
    ("params", "weights", "message"),
    [
        ({"criterion": "poisson"}, None, "criterion"),
        ({"subtree_rows": 0}, None, "subtree_rows"),
        ({"replicas": 0}, None, "replicas"),
        ({}, [0.0, 0.0], "at least one non-zero"),
        ({}, [1.0, -1.0], "[Nn]egative"),
    ],
)
def test_bad_input_is_a_value_error(params: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ml.DecisionTreeClassifier(**params).fit([[0.0], [1.0]], [0, 1], weights)


def test_max_samples_beyond_the_rows_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="there are only 2 rows"):
        ml.RandomForestClassifier(max_samples=3).fit([[0.0], [1.0]], [0, 1])


def test_tree_without_hosts_that_have_workers_is_a_node_lost_error() -> None:
    with (
        hoplite_mp.Cluster(workers=0, memory="64MiB"),
        pytest.raises(hoplite_mp.NodeLostError, match="add_workers"),
    ):
        ml.DecisionTreeClassifier().fit([[0.0], [1.0]], [0, 1])
