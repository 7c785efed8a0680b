"""A host is killed while an estimator is fitted: the result is that of the undisturbed run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import forked
from tests.support.lan_programs import run_with_losses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# `count` is the number of the answer, or of the pass, in whose place a host is killed.
TREES = """
from sklearn.datasets import load_digits
from hoplite_mp import ml
from hoplite_mp.ml._tree_growth import TreeGrowth
x, y = load_digits(return_X_y=True)
models = [
    ml.DecisionTreeClassifier(subtree_rows=150, random_state=0, replicas=1),
    ml.RandomForestClassifier(3, subtree_rows=400, random_state=0, replicas=2),
]
plain = TreeGrowth._answer
def bits(model):
    trees = getattr(model, "estimators_", [model])
    return b"".join(t.tree_.threshold.tobytes() + t.tree_.value.tobytes() for t in trees)
undisturbed = [bits(model.fit(x, y)) for model in models]
for model, host, expected in zip(models, ("h2", "h3"), undisturbed):
    count = 25
    def answer(self, future):
        global count
        count -= 1
        if count == 0:
            killed(host)
        plain(self, future)
    TreeGrowth._answer = answer
    print(bits(model.fit(x, y)) == expected, count < 0)
"""
GROUPS = """
from hoplite_mp import ml
from hoplite_mp.ml._group_by_parts import Parts
rng = np.random.default_rng(0)
x, groups = rng.normal(size=(900, 3)), rng.integers(0, 5, 900)
y = x[:, 0] + rng.normal(size=900) > 0
def coefficients(fitted):
    return np.array([fitted.models_[g].coef_ for g in range(5)])
expected = coefficients(ml.GroupBy(ml.Logistic(), strategy="accumulate").fit(x, y, groups))
plain = Parts.sum
count = 3
def sum_(self, *args):
    global count
    count -= 1
    if count == 0:
        killed("h2")
    return plain(self, *args)
Parts.sum = sum_
found = ml.GroupBy(ml.Logistic(), strategy="accumulate").fit(x, y, groups)
print(np.allclose(coefficients(found), expected, rtol=1e-9), count < 0)
"""


@pytest.fixture(autouse=True, scope="module")
def imported() -> Iterator[None]:
    """Drivers and workers find what each of them would import for seconds."""
    with forked.programs("hoplite_mp.ml._tree_tasks", "hoplite_mp.ml._group_by_parts"):
        yield


@pytest.mark.usefixtures("lan_permitted")
def test_trees_with_two_killed_hosts_are_unchanged(tmp_path: Path) -> None:
    """The first one has columns that are nowhere else but with the driver."""
    assert run_with_losses(3, tmp_path, TREES) == ["True True"] * 2


@pytest.mark.usefixtures("lan_permitted")
def test_models_of_groups_with_a_killed_host_are_unchanged(tmp_path: Path) -> None:
    assert run_with_losses(3, tmp_path, GROUPS) == ["True True"]
