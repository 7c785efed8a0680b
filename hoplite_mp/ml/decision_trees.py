"""Exact decision trees over a table whose columns are on several hosts.

The estimators are subclasses of scikit-learn's, with the same attributes after `fit`: `tree_` is a
scikit-learn tree, so prediction, export, pruning and importances are scikit-learn's own.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import sklearn.ensemble
import sklearn.tree
from sklearn.utils import check_random_state, compute_sample_weight
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from hoplite_mp.ml._host_tasks import host_tasks
from hoplite_mp.ml._tree_growth import ColumnStore, TreeGrowth
from hoplite_mp.ml._tree_tasks import Rules, Sample

__all__ = ["DecisionTreeClassifier", "DecisionTreeRegressor", "RandomForestClassifier"]

SEED_MAX = np.iinfo(np.int32).max
OWN_CONSTRAINTS = {
    "subtree_rows": [Interval(Integral, 1, None, closed="left")],
    "replicas": [Interval(Integral, 1, None, closed="left")],
}


class _ColumnTrees:
    """The base class of the estimators."""

    subtree_rows: int
    replicas: int

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.allow_nan = False
        tags.input_tags.sparse = False
        tags.target_tags.multi_output = False
        tags.target_tags.single_output = True
        if tags.classifier_tags is not None:
            tags.classifier_tags.multi_label = False
        return tags

    def _table(self, X: Any, y: Any, sample_weight: Any, classifies: bool) -> tuple[Any, Any, Any]:
        """Checks the data. Returns the columns, the targets as small numbers, and the weights or
        None. Sets `classes_`."""
        self._validate_params()  # type: ignore[attr-defined]
        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=not classifies)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(
                sample_weight, X, dtype=np.float64, ensure_non_negative=True
            )
        self.n_outputs_ = 1
        if not classifies:
            return X, np.asarray(y, np.float64), sample_weight
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self.n_classes_ = len(self.classes_)
        class_weight = self.class_weight  # type: ignore[attr-defined]
        if class_weight is not None:
            expanded = compute_sample_weight(class_weight, y)
            sample_weight = expanded if sample_weight is None else sample_weight * expanded
        return X, codes.astype(np.min_scalar_type(self.n_classes_ - 1)), sample_weight

    def _rules(self, n_rows: int, total_weight: float, classifies: bool) -> Rules:
        """The parameters as absolute numbers, converted as in scikit-learn."""
        params: Any = self
        least, split = params.min_samples_leaf, params.min_samples_split
        if not isinstance(least, Integral):
            least = math.ceil(least * n_rows)
        if not isinstance(split, Integral):
            split = max(2, math.ceil(split * n_rows))
        return Rules(
            criterion=params.criterion,
            n_classes=self.n_classes_ if classifies else 0,
            n_features=params.n_features_in_,
            max_features=_max_features(params.max_features, params.n_features_in_),
            max_depth=np.iinfo(np.int32).max if params.max_depth is None else params.max_depth,
            min_samples_split=max(split, 2 * least),
            min_samples_leaf=least,
            min_weight_leaf=params.min_weight_fraction_leaf * total_weight,
            min_impurity_decrease=params.min_impurity_decrease,
            total_weight=total_weight,
        )

    def _grow(self, X: Any, y: Any, weights: Any, samples: list[tuple[Sample, Rules, int]]) -> Any:
        store = ColumnStore(host_tasks(), X, y, weights, self.replicas)
        return TreeGrowth(store, self.subtree_rows).grow(samples)

    def _fit_one(self, X: Any, y: Any, sample_weight: Any, classifies: bool) -> None:
        """Grows a single tree, and sets `tree_`."""
        params: Any = self
        X, y, weights = self._table(X, y, sample_weight, classifies)
        total = float(len(X) if weights is None else weights.sum())
        rules = self._rules(len(X), total, classifies)
        seed = int(check_random_state(params.random_state).randint(SEED_MAX))
        params.max_features_ = rules.max_features
        (params.tree_,) = self._grow(X, y, weights, [(Sample(len(X)), rules, seed)])
        params._prune_tree()


def _max_features(value: Any, n_features: int) -> int:
    """The number of columns that `max_features` means in scikit-learn."""
    if value is None:
        return n_features
    if value == "sqrt":
        return max(1, int(np.sqrt(n_features)))
    if value == "log2":
        return max(1, int(np.log2(n_features)))
    if isinstance(value, Integral):
        return min(int(value), n_features)
    return max(1, int(value * n_features))


class DecisionTreeClassifier(_ColumnTrees, sklearn.tree.DecisionTreeClassifier):
    """A classification tree, grown by all hosts of the current cluster.

    The tree is scikit-learn's, with the same thresholds and the same conversion of X to float32,
    wherever a node's best split is unique. Among splits of equal gain the choice may differ.
    Without an open cluster the tree is grown in the calling process. The loss of a host does not
    change the result. Missing values, sparse input, several outputs and `max_leaf_nodes` are not
    supported.

    The algorithm is TreeServer's (Yan et al., ICDE 2022): a node with many rows is split by the
    hosts that hold the columns. The whole subtree of a small node is built by one host.

    Parameters
    ----------
    criterion : {"gini", "entropy", "log_loss"}, default="gini"
        The measure of a split's quality.
    max_depth, min_samples_split, min_samples_leaf, min_weight_fraction_leaf, max_features, \
random_state, min_impurity_decrease, class_weight, ccp_alpha
        As in scikit-learn.
    subtree_rows : int, default=10_000
        A node with more rows is split by all hosts together. The whole subtree of a smaller node is
        built by one host.
    replicas : int, default=2
        The number of hosts that have a copy of each column. More copies mean fewer bytes over the
        links while the tree is grown, and more memory.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> tree = ml.DecisionTreeClassifier(max_depth=2).fit([[0.0], [1.0], [2.0]], [0, 0, 1])
    >>> tree.predict([[1.4], [1.6]]).tolist()
    [0, 1]
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **sklearn.tree.DecisionTreeClassifier._parameter_constraints,
        "criterion": [StrOptions({"gini", "entropy", "log_loss"})],
        **OWN_CONSTRAINTS,
    }

    def __init__(
        self,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = None,
        random_state: Any = None,
        min_impurity_decrease: float = 0.0,
        class_weight: Any = None,
        ccp_alpha: float = 0.0,
        subtree_rows: int = 10_000,
        replicas: int = 2,
    ) -> None:
        super().__init__(
            criterion=criterion,
            max_depth=max_depth,
            min_samples_split=min_samples_split,
            min_samples_leaf=min_samples_leaf,
            min_weight_fraction_leaf=min_weight_fraction_leaf,
            max_features=max_features,
            random_state=random_state,
            min_impurity_decrease=min_impurity_decrease,
            class_weight=class_weight,
            ccp_alpha=ccp_alpha,
        )
        self.subtree_rows = subtree_rows
        self.replicas = replicas

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DecisionTreeClassifier:
        """Grows the tree.

        Parameters
        ----------
        X : array-like of shape (rows, columns)
            Converted to float32. NaN and infinity raise ValueError.
        y : array-like of shape (rows,)
            The classes, as numbers or text.
        sample_weight : array-like of shape (rows,), optional
            Weights, at least 0. Rows with weight 0 are left out.

        Raises
        ------
        ValueError
            A parameter or the data are not valid.
        NodeLostError
            No host with workers is left.
        """
        self._fit_one(X, y, sample_weight, True)
        return self


class DecisionTreeRegressor(_ColumnTrees, sklearn.tree.DecisionTreeRegressor):
    """A regression tree, grown by all hosts of the current cluster.

    Otherwise like `DecisionTreeClassifier`. Sums of targets depend on the order of the additions,
    so values and impurities of nodes equal scikit-learn's up to rounding.

    Parameters
    ----------
    criterion : {"squared_error", "absolute_error"}, default="squared_error"
        The measure of a split's quality.
    max_depth, min_samples_split, min_samples_leaf, min_weight_fraction_leaf, max_features, \
random_state, min_impurity_decrease, ccp_alpha
        As in scikit-learn.
    subtree_rows : int, default=10_000
        A node with more rows is split by all hosts together. The whole subtree of a smaller node is
        built by one host.
    replicas : int, default=2
        The number of hosts that have a copy of each column.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> tree = ml.DecisionTreeRegressor().fit([[0.0], [1.0], [2.0]], [0.5, 0.5, 3.0])
    >>> tree.predict([[0.2], [5.0]]).tolist()
    [0.5, 3.0]
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **sklearn.tree.DecisionTreeRegressor._parameter_constraints,
        "criterion": [StrOptions({"squared_error", "absolute_error"})],
        **OWN_CONSTRAINTS,
    }

    def __init__(
        self,
        *,
        criterion: str = "squared_error",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = None,
        random_state: Any = None,
        min_impurity_decrease: float = 0.0,
        ccp_alpha: float = 0.0,
        subtree_rows: int = 10_000,
        replicas: int = 2,
    ) -> None:
        super().__init__(
            criterion=criterion,
            max_depth=max_depth,
            min_samples_split=min_samples_split,
            min_samples_leaf=min_samples_leaf,
            min_weight_fraction_leaf=min_weight_fraction_leaf,
            max_features=max_features,
            random_state=random_state,
            min_impurity_decrease=min_impurity_decrease,
            ccp_alpha=ccp_alpha,
        )
        self.subtree_rows = subtree_rows
        self.replicas = replicas

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DecisionTreeRegressor:
        """Grows the tree, like `DecisionTreeClassifier.fit`, but the targets are numbers."""
        self._fit_one(X, y, sample_weight, False)
        return self


class RandomForestClassifier(_ColumnTrees, sklearn.ensemble.RandomForestClassifier):
    """A random forest, grown by all hosts of the current cluster.

    As in scikit-learn, each tree is grown from a random sample of the rows, and `max_features`
    columns are searched at each node. The hosts draw the sample from the tree's seed. The random
    numbers differ from scikit-learn's, so the trees differ, but have the same accuracy. The same
    `random_state` gives the same trees on any number of hosts, even if a host is lost. If
    `replicas` is the number of hosts and `subtree_rows` is the number of rows, each tree is one
    task.

    Parameters
    ----------
    n_estimators : int, default=100
        The number of trees.
    criterion, max_depth, min_samples_split, min_samples_leaf, min_weight_fraction_leaf, \
max_features, bootstrap, max_samples, random_state, min_impurity_decrease
        As in scikit-learn.
    class_weight : {"balanced"} or dict, optional
        As in scikit-learn. The weight of a row is multiplied by the number of times that it is
        drawn.
    subtree_rows : int, default=10_000
        A node with more rows is split by all hosts together. The whole subtree of a smaller node is
        built by one host.
    replicas : int, default=2
        The number of hosts that have a copy of each column.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> X, y = [[0.0], [0.1], [2.0], [2.1]], ["low", "low", "high", "high"]
    >>> trees = ml.RandomForestClassifier(20, random_state=0).fit(X, y)
    >>> trees.predict([[0.05], [2.05]]).tolist()
    ['low', 'high']
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **sklearn.ensemble.RandomForestClassifier._parameter_constraints,
        "criterion": [StrOptions({"gini", "entropy", "log_loss"})],
        "class_weight": [StrOptions({"balanced"}), dict, None],
        **OWN_CONSTRAINTS,
    }

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = "sqrt",
        bootstrap: bool = True,
        max_samples: Any = None,
        random_state: Any = None,
        min_impurity_decrease: float = 0.0,
        class_weight: Any = None,
        subtree_rows: int = 10_000,
        replicas: int = 2,
    ) -> None:
        super().__init__(
            n_estimators,
            criterion=criterion,
            max_depth=max_depth,
            min_samples_split=min_samples_split,
            min_samples_leaf=min_samples_leaf,
            min_weight_fraction_leaf=min_weight_fraction_leaf,
            max_features=max_features,
            bootstrap=bootstrap,
            max_samples=max_samples,
            random_state=random_state,
            min_impurity_decrease=min_impurity_decrease,
            class_weight=class_weight,
        )
        self.subtree_rows = subtree_rows
        self.replicas = replicas

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> RandomForestClassifier:
        """Grows the trees, like `DecisionTreeClassifier.fit`."""
        X, y, weights = self._table(X, y, sample_weight, True)
        n_rows = len(X)
        drawn = self._drawn(n_rows)
        generator = check_random_state(self.random_state)
        samples = []
        for _ in range(self.n_estimators):
            seed = int(generator.randint(SEED_MAX))
            sample = Sample(n_rows, seed, drawn) if self.bootstrap else Sample(n_rows)
            total = float(drawn if weights is None else sample.weights(weights).sum())
            samples.append((sample, self._rules(n_rows, total, True), seed))
        self.estimators_ = [
            self._tree(tree, rules, seed)
            for tree, (_, rules, seed) in zip(
                self._grow(X, y, weights, samples), samples, strict=True
            )
        ]
        return self

    def _validate_X_predict(self, X: Any) -> Any:
        """Checks X. This replaces scikit-learn's method, which lets the trees check X; the trees
        would accept NaN."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float32, reset=False)

    def _drawn(self, n_rows: int) -> int:
        """The number of rows from which a tree is grown."""
        if not self.bootstrap:
            if self.max_samples is not None:
                raise ValueError("max_samples needs bootstrap=True")
            return n_rows
        if self.max_samples is None:
            return n_rows
        if isinstance(self.max_samples, Integral):
            value = int(self.max_samples)
            if value > n_rows:
                raise ValueError(f"max_samples is {value}, but there are only {n_rows} rows")
            return value
        return max(round(n_rows * float(self.max_samples)), 1)

    def _tree(self, grown: Any, rules: Rules, seed: int) -> Any:
        """A tree for `estimators_`. As in scikit-learn, its classes are numbers."""
        names = [name for name in self.estimator_params if name != "random_state"]
        params = {name: getattr(self, name) for name in names}
        tree = sklearn.tree.DecisionTreeClassifier(random_state=seed, **params)
        tree.n_features_in_, tree.n_outputs_ = self.n_features_in_, 1
        tree.classes_, tree.n_classes_ = np.arange(self.n_classes_), self.n_classes_
        tree.max_features_, tree.tree_ = rules.max_features, grown
        return tree
