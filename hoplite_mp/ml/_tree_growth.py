"""Grows decision trees over a table whose columns are on several hosts.

A tree node with many rows becomes a column task: each host returns the best split by its columns.
One holder of the winning column keeps the bitmap of the node's rows, and the children's tasks read
it there. A tree node with few rows becomes a subtree task: one host gathers the node's rows in all
columns, and builds the subtree. Row numbers never pass through the driver. Large nodes are
processed breadth first. Subtrees are processed depth first, a limited number at a time.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import errors
from hoplite_mp.ml import _tree_tasks as on_hosts
from hoplite_mp.ml._host_tasks import NO_WORKERS, is_loss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hoplite_mp.ml._host_tasks import HostTasks
    from hoplite_mp.ml._tree_tasks import Rules, Sample

__all__ = ["ColumnStore", "TreeGrowth"]

SUBTREES_AHEAD = 2  # number of running or queued subtree tasks for each worker
URGENT = 1  # priority of column tasks, which lead to further tasks
LOSSES_MAX = 100  # maximum number of lost tasks of a tree node, which may have many tasks at a time
EPSILON = np.finfo("double").eps  # a lower impurity counts as 0, as in scikit-learn
LEAF, UNDEFINED = -1, -2


class ColumnStore:
    """The columns of a table, each on `replicas` hosts, and the targets and weights on all hosts.

    x: float32, (rows, columns). y: numbers, (rows,). weights: float64, (rows,), or None."""

    def __init__(self, tasks: HostTasks, x: Any, y: Any, weights: Any, replicas: int) -> None:
        self.tasks = tasks
        self.hosts = tasks.hosts()
        if not self.hosts:
            raise errors.NodeLostError(NO_WORKERS)
        self.n_rows, self.n_columns = x.shape
        names = list(self.hosts)
        self.y = tasks.put(y, names)
        self.weights = None if weights is None else tasks.put(weights, names)
        self.columns: list[Any] = []
        self.holders: list[list[str]] = []
        for number in range(self.n_columns):
            copies = range(number, number + min(replicas, len(names)))
            chosen = [names[copy % len(names)] for copy in copies]
            self.columns.append(tasks.put(np.ascontiguousarray(x[:, number]), chosen))
            self.holders.append(chosen)

    def look_for_losses(self) -> None:
        """Drops lost hosts. Assigns columns without a holder to other hosts."""
        living = self.tasks.hosts()
        self.hosts = {name: self.hosts[name] for name in self.hosts if name in living}
        if not self.hosts:
            raise errors.NodeLostError("all hosts with columns are lost")
        names = list(self.hosts)
        for number, holders in enumerate(self.holders):
            left = [name for name in holders if name in self.hosts]
            self.holders[number] = left or [names[number % len(names)]]

    def shares(self, numbers: Iterable[int], prefer: str | None = None) -> dict[str, list[int]]:
        """Divides these columns among their holders: host -> columns. A column is assigned to the
        host `prefer` if that host holds it; the others are divided evenly."""
        found: dict[str, list[int]] = {}
        for number in numbers:
            holders = self.holders[number]
            if prefer in holders:
                chosen = prefer
            else:
                chosen = min(holders, key=lambda name: len(found.get(name, ())) / self.hosts[name])
            assert chosen is not None
            found.setdefault(chosen, []).append(number)
        return found

    def of(self, numbers: Sequence[int]) -> list[Any]:
        return [self.columns[number] for number in numbers]


@dataclasses.dataclass(eq=False)
class _TreeNode:
    """A node of a growing tree. `record` and `value` have scikit-learn's form."""

    growing: _GrowingTree
    parent: _TreeNode | None
    is_left: bool
    depth: int
    seed: int
    n_rows: int
    record: Any = None
    value: Any = None
    children: tuple[_TreeNode, _TreeNode] | None = None
    subtree: tuple[int, Any, Any] | None = None  # the subtree's depth, records and values
    bitmap: Any = None  # Future of the bitmap of the rows that go left, on `bitmap_host`
    bitmap_host: str = ""
    order: Any = None  # columns in the order in which they are tried
    tried: int = 0
    best: tuple[float, int, Any, Any] | None = None
    losses: int = 0


@dataclasses.dataclass(eq=False)
class _GrowingTree:
    sample: Sample
    rules: Rules
    root: _TreeNode | None = None


@dataclasses.dataclass(eq=False)
class _ColumnTask:
    """The search for a tree node's split, which collects the results of several hosts."""

    node: _TreeNode
    missing: int = 0


class TreeGrowth:
    """Grows several trees at once from one `ColumnStore`."""

    def __init__(self, store: ColumnStore, subtree_rows: int) -> None:
        self.store = store
        self.tasks = store.tasks
        self.subtree_rows = subtree_rows
        # Future -> the column task or tree node, and the columns that are searched
        self.asked: dict[Any, tuple[_ColumnTask | _TreeNode, list[int]]] = {}
        self.subtrees: list[_TreeNode] = []  # subtrees that have not begun
        self.load: dict[str, int] = dict.fromkeys(store.hosts, 0)  # rows of subtrees in progress
        self.places: dict[Any, tuple[str, int]] = {}  # Future of a subtree -> host, rows

    def grow(self, samples: Sequence[tuple[Sample, Rules, int]]) -> list[Any]:
        """Grows a tree for each (sample, rules, seed). Returns them as scikit-learn's `Tree`s."""
        trees = []
        for sample, rules, seed in samples:
            tree = _GrowingTree(sample, rules)
            tree.root = _TreeNode(tree, None, False, 0, seed, sample.n_rows)
            trees.append(tree)
            self._begin(tree.root)
        try:
            self._begin_subtrees()
            while self.asked:
                self._answer(self.tasks.completed())
        except BaseException:
            self.tasks.cancel()
            raise
        return [_assemble(tree) for tree in trees]

    def _answer(self, future: Any) -> None:
        asked, numbers = self.asked.pop(future)
        host, rows = self.places.pop(future, ("", 0))
        if host in self.load:
            self.load[host] -= rows
        error = future.exception()
        if error is not None and not is_loss(error):
            raise error
        if error is not None:
            node = asked.node if isinstance(asked, _ColumnTask) else asked
            node.losses += 1
            if node.losses > LOSSES_MAX:
                raise error
            self.store.look_for_losses()
            self.load = {name: self.load.get(name, 0) for name in self.store.hosts}
        if isinstance(asked, _ColumnTask):
            asked.missing -= 1
            if error is None:
                self._compare(asked, future.result())
            else:
                self._search(asked, numbers)
        elif error is None:
            asked.subtree = future.result()
        else:
            self.subtrees.append(asked)
        self._begin_subtrees()

    # -- nodes -----------------------------------------------------------------------------------

    def _begin(self, node: _TreeNode) -> None:
        """Begins a tree node whose impurity is known, or the root."""
        rules = node.growing.rules
        if node.record is not None and _is_leaf(node, rules):
            return
        if node.n_rows <= self.subtree_rows:
            self.subtrees.append(node)
            return
        order = np.arange(rules.n_features)
        if rules.max_features < rules.n_features:
            order = np.random.RandomState(node.seed).permutation(order)
        node.order = order
        self._try_more(_ColumnTask(node))

    def _try_more(self, task: _ColumnTask) -> None:
        """Requests the best split by one of the next `max_features` columns."""
        node = task.node
        numbers = node.order[node.tried : node.tried + node.growing.rules.max_features]
        node.tried += len(numbers)
        self._search(task, numbers.tolist())

    def _search(self, task: _ColumnTask, numbers: list[int]) -> None:
        """Requests the best splits by these columns from their holders."""
        node, store = task.node, self.store
        growing, path = node.growing, self._path(node)
        for host, share in store.shares(numbers).items():
            workers = min(store.hosts[host], len(share))
            for part in (share[at::workers] for at in range(workers)):
                future = self.tasks.submit(
                    host, on_hosts.best_split, store.of(part), part, growing.rules,
                    growing.sample, store.y, store.weights, path, priority=URGENT,
                )  # fmt: skip
                task.missing += 1
                self._watch(future, task, part)

    def _compare(self, task: _ColumnTask, answer: tuple[float, int, Any, Any]) -> None:
        """Processes a result. After the last result, the tree node is split, or becomes a leaf."""
        node = task.node
        if node.best is None or (-answer[0], answer[1]) < (-node.best[0], node.best[1]):
            node.best = answer
        if task.missing:
            return
        gain, number, records, values = node.best
        node.record, node.value = records[0].copy(), values[0]
        rules = node.growing.rules
        if node.parent is None and _is_leaf(node, rules):
            return  # the root's impurity was not known before the search
        if np.isneginf(gain):
            if node.tried < rules.n_features:
                node.best = None
                self._try_more(task)
            return
        if gain / rules.total_weight + EPSILON < rules.min_impurity_decrease:
            return
        node.record["feature"] = number
        seeds = np.random.SeedSequence(node.seed).generate_state(2)
        children = [
            _TreeNode(
                node.growing, node, at == 0, node.depth + 1, int(seeds[at]),
                int(records[at + 1]["n_node_samples"]), records[at + 1].copy(), values[at + 1],
            )
            for at in range(2)
        ]  # fmt: skip
        node.children = children[0], children[1]
        for child in children:
            self._begin(child)

    def _path(self, node: _TreeNode) -> list[tuple[Any, bool]]:
        """The bitmaps of a tree node's ancestors, from the root. Bitmaps that were lost with a
        host are computed again."""
        if node.parent is None:
            return []
        path, parent, store = self._path(node.parent), node.parent, self.store
        if parent.bitmap is None or parent.bitmap_host not in store.hosts:
            number = int(parent.record["feature"])
            parent.bitmap_host = min(store.holders[number], key=lambda name: self.load[name])
            parent.bitmap = self.tasks.submit(
                parent.bitmap_host, on_hosts.divide, store.columns[number],
                float(parent.record["threshold"]), parent.growing.sample, store.weights, path,
                priority=URGENT,
            )  # fmt: skip
        return [*path, (parent.bitmap, node.is_left)]

    # -- subtrees --------------------------------------------------------------------------------

    def _begin_subtrees(self) -> None:
        """Begins subtrees, the latest first, but no more at a time than are needed to keep the
        workers busy."""
        while self.subtrees and len(self.places) < SUBTREES_AHEAD * sum(self.store.hosts.values()):
            self._grow_subtree(self.subtrees.pop())

    def _grow_subtree(self, node: _TreeNode) -> None:
        """Starts a subtree task on the host with the least load. The other hosts send the columns
        that it lacks."""
        store, growing = self.store, node.growing
        host = min(store.hosts, key=lambda name: self.load[name] / store.hosts[name])
        path = self._path(node)
        shares = store.shares(range(store.n_columns), prefer=host)
        local = shares.pop(host, [])
        taken = [
            (
                numbers,
                self.tasks.submit(
                    other, on_hosts.take, store.of(numbers), growing.sample, store.weights, path
                ),
            )
            for other, numbers in shares.items()
        ]
        future = self.tasks.submit(
            host, on_hosts.grow_subtree, (local, store.of(local)), taken, growing.rules,
            node.depth, node.seed, growing.sample, store.y, store.weights, path,
        )  # fmt: skip
        self.load[host] += node.n_rows
        self.places[future] = host, node.n_rows
        self._watch(future, node, [])

    def _watch(self, future: Any, asked: _ColumnTask | _TreeNode, numbers: list[int]) -> None:
        self.asked[future] = asked, numbers
        self.tasks.watch(future)


def _is_leaf(node: _TreeNode, rules: Rules) -> bool:
    """Whether scikit-learn's builder would make this tree node a leaf without searching for a
    split."""
    n_rows = int(node.record["n_node_samples"])
    return bool(
        node.depth >= rules.max_depth
        or n_rows < rules.min_samples_split
        or n_rows < 2 * rules.min_samples_leaf
        or node.record["weighted_n_node_samples"] < 2 * rules.min_weight_leaf
        or node.record["impurity"] <= EPSILON
    )


def _assemble(growing: _GrowingTree) -> Any:
    """The tree, with its nodes in preorder, as in scikit-learn's builder."""
    assert growing.root is not None
    records: list[Any] = []
    values: list[Any] = []
    deepest, count = 0, 0
    waiting: list[tuple[_TreeNode, Any]] = [(growing.root, None)]  # (node, its parent's record)
    while waiting:
        node, above = waiting.pop()
        node.bitmap = None  # frees the bitmap now, because reference cycles keep the nodes alive
        if above is not None:
            above["left_child" if node.is_left else "right_child"] = count
        if node.subtree is not None:
            depth, own, its_values = node.subtree
            own = own.copy()
            for name in ("left_child", "right_child"):
                own[name] = np.where(own[name] == LEAF, LEAF, own[name] + count)
            deepest = max(deepest, node.depth + depth)
        else:
            own, its_values = node.record.reshape(1), node.value[np.newaxis]
            deepest = max(deepest, node.depth)
            if node.children is None:
                for name, value in (("left_child", LEAF), ("right_child", LEAF),
                                    ("feature", UNDEFINED), ("threshold", UNDEFINED)):  # fmt: skip
                    own[name] = value
            else:
                left, right = node.children
                waiting += [(right, own[0:1]), (left, own[0:1])]
        records.append(own)
        values.append(its_values)
        count += len(own)
    tree = growing.rules.empty_tree(growing.rules.n_features)
    state = {"max_depth": deepest, "node_count": count, "nodes": np.concatenate(records)}
    tree.__setstate__(state | {"values": np.ascontiguousarray(np.concatenate(values))})
    return tree
