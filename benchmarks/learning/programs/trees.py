"""Programs of the experiment `trees`: a tree by our estimators, scikit-learn's, or LightGBM's.

`system`: "ours" and "sklearn" are started on the first host; "lightgbm" on all hosts, each with its
share of the rows.
"""

import numpy as np

from examples.applications.fashion_mnist import load
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say

PULLOVER, COAT, SHIRT = 2, 4, 6  # the classes that are hard to tell apart
LIGHTGBM_PORT = 12400


def table(kind, rows):
    """Means of 2 × 2 pixels, float32, and the classes."""
    pixels, labels = load(kind)
    pixels, labels = pixels[:rows], labels[:rows]
    small = pixels.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32)
    return small.reshape(len(small), 196), labels


def is_top(labels):
    """The target of the single trees: pullover, coat or shirt."""
    return np.isin(labels, (PULLOVER, COAT, SHIRT)).astype(int)


def sketch(tree):
    """The arrays of the tree that the experiment compares, as lists."""
    names = ("feature", "threshold", "children_left", "children_right", "n_node_samples",
             "weighted_n_node_samples", "impurity")  # fmt: skip
    return {name: getattr(tree, name).tolist() for name in names}


def ours_or_sklearn(given):
    x, y = table("train", given.rows)
    x_test, y_test = table("t10k", given.rows)
    if given.system == "ours":
        from hoplite_mp import ml as package

        more = {"subtree_rows": given.subtree_rows, "replicas": given.replicas}
    else:
        import sklearn.ensemble
        import sklearn.tree as package

        more = {}
    if given.trees:
        if given.system == "sklearn":
            package = sklearn.ensemble
        model = package.RandomForestClassifier(given.trees, random_state=0, **more)
    else:
        y, y_test = is_top(y), is_top(y_test)
        model = package.DecisionTreeClassifier(
            max_depth=given.depth, min_samples_leaf=given.leaf, random_state=0, **more
        )
    say("begun")
    model.fit(x, y)
    say("ended")
    score = float(model.score(x_test, y_test))
    tree = None if given.trees else sketch(model.tree_)
    say("result", accuracy=score, tree=tree)


def lightgbm(given):
    import lightgbm

    x, y = table("train", given.rows)
    x_test, y_test = table("t10k", given.rows)
    y, y_test = is_top(y), is_top(y_test)
    own = np.arange(len(x)) % given.hosts == given.rank
    hosts = given.machines
    params = {
        "objective": "binary", "tree_learner": given.learner, "num_machines": given.hosts,
        "machines": ",".join(f"{host}:{LIGHTGBM_PORT}" for host in hosts),
        "local_listen_port": LIGHTGBM_PORT, "num_threads": 1, "time_out": 120,
        "max_depth": given.depth, "num_leaves": given.leaves, "min_data_in_leaf": given.leaf,
        "min_sum_hessian_in_leaf": 0.0, "learning_rate": 1.0, "verbose": -1,
        "pre_partition": True,
    }  # fmt: skip
    data = lightgbm.Dataset(x[own], y[own], params=params)
    if given.rank == 0:
        say("begun")
    model = lightgbm.train(params, data, num_boost_round=1)
    if given.rank == 0:
        say("ended")
        score = float(((model.predict(x_test) > 0.5) == y_test).mean())
        say("result", accuracy=score, leaves=model.dump_model()["tree_info"][0]["num_leaves"])


if __name__ == "__main__":
    given = arguments(
        system="ours", rows=60_000, depth=10, leaf=50, leaves=0, trees=0, subtree_rows=10_000,
        replicas=2, rank=None, learner="data", machines=(), tls=False,
    )  # fmt: skip
    if given.system == "lightgbm":
        lightgbm(given)
    elif given.system == "ours":
        with connect(given):
            ours_or_sklearn(given)
    else:
        ours_or_sklearn(given)
