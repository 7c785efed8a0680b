"""The tasks that hosts run for a decision tree: best splits, the rows of children, and subtrees.

scikit-learn's own splitter and criteria find the splits, one column at a time. A tree node is
described by its path: for each ancestor, a packed bitmap of the ancestor's rows that go left, and
whether this node is on the left.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.tree._classes import CRITERIA_CLF, CRITERIA_REG, DENSE_SPLITTERS
from sklearn.tree._tree import DepthFirstTreeBuilder, Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Rules", "Sample", "best_split", "divide", "grow_subtree", "take"]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules that decide when and how nodes are split, with scikit-learn's meanings and units.

    n_classes: 0 for regression. min_weight_leaf: an absolute weight. total_weight: the weight of
    all rows."""

    criterion: str
    n_classes: int
    n_features: int
    max_features: int
    max_depth: int
    min_samples_split: int
    min_samples_leaf: int
    min_weight_leaf: float
    min_impurity_decrease: float
    total_weight: float

    def empty_tree(self, n_features: int) -> Any:
        return Tree(n_features, np.array([max(1, self.n_classes)], np.intp), 1)

    def build(
        self,
        x: Any,
        y: Any,
        weights: Any,
        *,
        depth: int,
        max_features: int,
        decrease: float,
        seed: int,
    ) -> Any:
        """A tree of at most that depth over these rows, built by scikit-learn's depth-first
        builder."""
        if self.n_classes:
            criterion = CRITERIA_CLF[self.criterion](1, np.array([self.n_classes], np.intp))
        else:
            criterion = CRITERIA_REG[self.criterion](1, len(x))
        least = self.min_samples_leaf, self.min_weight_leaf
        generator = np.random.RandomState(seed)
        splitter = DENSE_SPLITTERS["best"](criterion, max_features, *least, generator, None)
        tree = self.empty_tree(x.shape[1])
        builder = DepthFirstTreeBuilder(splitter, self.min_samples_split, *least, depth, decrease)
        builder.build(tree, x, y, weights, None)
        return tree


@dataclasses.dataclass(frozen=True)
class Sample:
    """The rows from which a tree is grown: all rows, or `drawn` rows that are drawn with
    replacement from a seed."""

    n_rows: int
    seed: int | None = None
    drawn: int = 0

    def weights(self, weights: Any) -> Any:
        """The weight of each row; None if all weights are one."""
        if self.seed is None:
            return weights
        indices = np.random.RandomState(self.seed).randint(0, self.n_rows, self.drawn)
        counts = np.bincount(indices, minlength=self.n_rows).astype(np.float64)
        return counts if weights is None else counts * weights


@dataclasses.dataclass(frozen=True)
class _NodeRows:
    """The rows of a node, with their targets and weights in the form that scikit-learn needs."""

    rows: Any
    y: Any
    weights: Any

    @classmethod
    def of(cls, sample: Sample, y: Any, weights: Any, path: Any) -> _NodeRows:
        all_weights = sample.weights(weights)
        rows = _rows(sample, all_weights, path)
        own = None if all_weights is None else np.ascontiguousarray(all_weights[rows], np.float64)
        return cls(rows, np.ascontiguousarray(y[rows], np.float64).reshape(-1, 1), own)


def _rows(sample: Sample, weights: Any, path: Any) -> Any:
    """The row numbers of a node, in ascending order. Rows without weight belong to no node."""
    rows = np.arange(sample.n_rows) if weights is None else np.flatnonzero(weights)
    for bits, left in path:
        goes_left = np.unpackbits(bits, count=len(rows)).view(bool)
        rows = rows[goes_left if left else ~goes_left]
    return rows


def best_split(
    columns: Sequence[Any], numbers: Sequence[int], rules: Rules,
    sample: Sample, y: Any, weights: Any, path: Any,
) -> tuple[float, int, Any, Any]:  # fmt: skip
    """The best split of a node by one of these columns, whose numbers in the table are `numbers`.

    Returns the gain, the column's number, and scikit-learn's records and values of the node and
    its two children. Among equal gains, the lowest column number wins. If there is no split, the
    gain is minus infinity, and only the node itself has a record."""
    node = _NodeRows.of(sample, y, weights, path)
    best: tuple[float, int, Any, Any] | None = None
    x = np.empty((len(node.rows), 1), np.float32)
    for number, column in sorted(zip(numbers, columns, strict=True), key=lambda pair: pair[0]):
        np.take(column, node.rows, out=x[:, 0], mode="clip")
        stump = rules.build(
            x, node.y, node.weights, depth=1, max_features=1, decrease=0.0, seed=0
        ).__getstate__()  # fmt: skip
        nodes, values = stump["nodes"], stump["values"]
        gain = _gain(nodes)
        if best is None or gain > best[0]:
            best = gain, number, np.array(nodes), np.array(values)
    assert best is not None
    return best


def _gain(nodes: Any) -> float:
    """The weighted decrease of the impurity through the first split of a tree."""
    if len(nodes) == 1:
        return -np.inf
    parts = nodes["weighted_n_node_samples"] * nodes["impurity"]
    return float(parts[0] - parts[1] - parts[2])


def divide(column: Any, threshold: float, sample: Sample, weights: Any, path: Any) -> Any:
    """The packed bitmap of the node's rows whose value in the column is at most the threshold."""
    rows = _rows(sample, sample.weights(weights), path)
    return np.packbits(column[rows] <= np.float64(threshold))


def take(columns: Sequence[Any], sample: Sample, weights: Any, path: Any) -> Any:
    """The values of a node's rows in these columns: float32, in Fortran order."""
    rows = _rows(sample, sample.weights(weights), path)
    taken = np.empty((len(rows), len(columns)), np.float32, order="F")
    for at, column in enumerate(columns):
        np.take(column, rows, out=taken[:, at], mode="clip")
    return taken


def grow_subtree(
    local: tuple[Sequence[int], Sequence[Any]], taken: Sequence[tuple[Sequence[int], Any]],
    rules: Rules, depth: int, seed: int, sample: Sample, y: Any, weights: Any, path: Any,
) -> tuple[int, Any, Any]:  # fmt: skip
    """Builds the subtree below a node at that depth. Returns the subtree's own depth, and its
    records and values in scikit-learn's form.

    local: the numbers of the columns that this host holds, and these columns. taken: the numbers of
    other columns, and the node's rows in them, as returned by `take` on other hosts."""
    node = _NodeRows.of(sample, y, weights, path)
    x = np.empty((len(node.rows), rules.n_features), np.float32, order="F")
    for number, column in zip(*local, strict=True):
        np.take(column, node.rows, out=x[:, number], mode="clip")
    for numbers, values in taken:
        x[:, numbers] = values
    weight = float(len(x) if node.weights is None else node.weights.sum())
    tree = rules.build(
        x, node.y, node.weights, depth=rules.max_depth - depth, max_features=rules.max_features,
        # scikit-learn divides the decrease by the weight of the rows passed to it, not of all rows.
        decrease=rules.min_impurity_decrease * (rules.total_weight / weight), seed=seed,
    )  # fmt: skip
    state = tree.__getstate__()
    return state["max_depth"], np.array(state["nodes"]), np.array(state["values"])
