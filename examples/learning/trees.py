"""How do I grow the decision tree of scikit-learn on all hosts, and what is sent?

The columns of the table lie on two hosts each. Nodes with many rows are split by all hosts
together, smaller ones by one host. `tests.lan` can emulate hosts: see docs/howto/several_hosts.md;
without an address the program runs on this host only, where nothing has to be sent.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import sys
import time

import numpy as np
import sklearn.tree
from sklearn.datasets import load_digits

import hoplite_mp
from hoplite_mp import ml

PARAMS = {"max_depth": 8, "min_samples_leaf": 40, "random_state": 0}
COPIES = 4  # of each picture, with noise


def data():
    """Pictures of digits, with noise that makes nearly every best split unique."""
    x, y = load_digits(return_X_y=True)
    noise = np.random.default_rng(0).normal(0.0, 0.5, (COPIES * len(x), x.shape[1]))
    return np.tile(x, (COPIES, 1)) + noise, np.tile(y, COPIES)


def gain(tree, node):
    """How much a node's split lowers the impurity, times the weight of its rows."""
    left, right = tree.children_left[node], tree.children_right[node]
    parts = [tree.weighted_n_node_samples[at] * tree.impurity[at] for at in (node, left, right)]
    return parts[0] - parts[1] - parts[2] if left >= 0 else 0.0


def compare(a, b, node=0, other=0):
    """How many nodes of two trees are the same; of equal gains either may have been taken."""
    if (a.feature[node], a.threshold[node]) != (b.feature[other], b.threshold[other]):
        assert np.isclose(gain(a, node), gain(b, other))
        return 0
    if a.children_left[node] < 0:
        return 1
    sides = ("children_left", "children_right")
    return 1 + sum(compare(a, b, getattr(a, s)[node], getattr(b, s)[other]) for s in sides)


def main():
    x, y = data()
    theirs = sklearn.tree.DecisionTreeClassifier(**PARAMS).fit(x, y)
    options = {"address": sys.argv[1]} if len(sys.argv) > 1 else {"workers": 2}
    with hoplite_mp.Cluster(**options) as c:
        begun, sent = time.monotonic(), c.stats()["bytes_sent"]
        ours = ml.DecisionTreeClassifier(**PARAMS, subtree_rows=1500).fit(x, y)
        seconds, sent = time.monotonic() - begun, c.stats()["bytes_sent"] - sent
        print(f"{seconds:.1f} s on {len(c.nodes)} host(s); {sent / 1e6:.2f} MB were sent")
        print(f"the table has {x.size * 4 / 1e6:.2f} MB as float32")
    same = compare(ours.tree_, theirs.tree_)
    print(f"{same} of {theirs.tree_.node_count} nodes are scikit-learn's, the others ties")
    print(sklearn.tree.export_text(ours, max_depth=1))


if __name__ == "__main__":
    main()
