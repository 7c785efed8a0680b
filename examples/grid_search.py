"""How do I run scikit-learn's searches on a cluster?

Importing the integration registers a joblib backend, which all joblib calls inside
`parallel_config` use. The data are stored once and read by all workers. With `cluster=` the backend
uses an open cluster, of one host or many.

Needs: sklearn, joblib
(`pip install 'hoplite-mp[joblib]' scikit-learn`)
"""

import joblib
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import hoplite_mp
import hoplite_mp.integrations.joblib

GRID = {"C": [1, 10], "gamma": [0.001, 0.01]}


def main():
    x, y = load_digits(return_X_y=True)
    x, y = x[:600], y[:600]
    plain = GridSearchCV(SVC(), GRID, cv=3).fit(x, y)
    with hoplite_mp.Cluster(workers=2) as c:
        with joblib.parallel_config(backend="hoplite_mp", cluster=c):
            search = GridSearchCV(SVC(), GRID, cv=3, n_jobs=-1).fit(x, y)
        print(f"{c.stats()['tasks_done']} tasks on {len(c.nodes)} node(s)")
    print(search.best_params_, f"{search.best_score_:.3f}")
    assert search.best_params_ == plain.best_params_
    assert (search.cv_results_["mean_test_score"] == plain.cv_results_["mean_test_score"]).all()


if __name__ == "__main__":
    main()
