"""Learning on top of the collectives: operators, compressors, optimisers and estimators.

Importing this package needs only numpy. Each name is imported when it is first used; estimators
then need scikit-learn (the extra `ml`).
"""

from sys import modules as _modules
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from hoplite_mp.ml._clustering import GaussianMixture as GaussianMixture
    from hoplite_mp.ml._clustering import KMeans as KMeans
    from hoplite_mp.ml._compressors import Float16 as Float16
    from hoplite_mp.ml._compressors import PowerSGD as PowerSGD
    from hoplite_mp.ml._compressors import Quantise as Quantise
    from hoplite_mp.ml._compressors import RandomBlocks as RandomBlocks
    from hoplite_mp.ml._compressors import Threshold as Threshold
    from hoplite_mp.ml._compressors import TopK as TopK
    from hoplite_mp.ml._cser import CSER as CSER
    from hoplite_mp.ml._feedback import Feedback as Feedback
    from hoplite_mp.ml._gossip import Gossip as Gossip
    from hoplite_mp.ml._linucb import FedLinUCB as FedLinUCB
    from hoplite_mp.ml._linucb import LinUCBServer as LinUCBServer
    from hoplite_mp.ml._ordered import ordered_reduce as ordered_reduce
    from hoplite_mp.ml._proactive import ProactiveResult as ProactiveResult
    from hoplite_mp.ml._proactive import proactive as proactive
    from hoplite_mp.ml.decision_trees import DecisionTreeClassifier as DecisionTreeClassifier
    from hoplite_mp.ml.decision_trees import DecisionTreeRegressor as DecisionTreeRegressor
    from hoplite_mp.ml.decision_trees import RandomForestClassifier as RandomForestClassifier
    from hoplite_mp.ml.group_by import GroupBy as GroupBy
    from hoplite_mp.ml.group_by import Logistic as Logistic
    from hoplite_mp.ml.group_by import LogisticModel as LogisticModel
    from hoplite_mp.ml.repetition import Repetition as Repetition
    from hoplite_mp.ml.robust import GeometricMedian as GeometricMedian
    from hoplite_mp.ml.robust import Krum as Krum
    from hoplite_mp.ml.robust import Median as Median
    from hoplite_mp.ml.robust import Score as Score
    from hoplite_mp.ml.robust import TrimmedMean as TrimmedMean
else:
    _MODULES = {
        "CSER": "hoplite_mp.ml._cser",
        "DecisionTreeClassifier": "hoplite_mp.ml.decision_trees",
        "DecisionTreeRegressor": "hoplite_mp.ml.decision_trees",
        "FedLinUCB": "hoplite_mp.ml._linucb",
        "Feedback": "hoplite_mp.ml._feedback",
        "Float16": "hoplite_mp.ml._compressors",
        "GaussianMixture": "hoplite_mp.ml._clustering",
        "GeometricMedian": "hoplite_mp.ml.robust",
        "Gossip": "hoplite_mp.ml._gossip",
        "GroupBy": "hoplite_mp.ml.group_by",
        "KMeans": "hoplite_mp.ml._clustering",
        "Krum": "hoplite_mp.ml.robust",
        "LinUCBServer": "hoplite_mp.ml._linucb",
        "Logistic": "hoplite_mp.ml.group_by",
        "LogisticModel": "hoplite_mp.ml.group_by",
        "Median": "hoplite_mp.ml.robust",
        "PowerSGD": "hoplite_mp.ml._compressors",
        "ProactiveResult": "hoplite_mp.ml._proactive",
        "Quantise": "hoplite_mp.ml._compressors",
        "RandomBlocks": "hoplite_mp.ml._compressors",
        "RandomForestClassifier": "hoplite_mp.ml.decision_trees",
        "Repetition": "hoplite_mp.ml.repetition",
        "Score": "hoplite_mp.ml.robust",
        "Threshold": "hoplite_mp.ml._compressors",
        "TopK": "hoplite_mp.ml._compressors",
        "TrimmedMean": "hoplite_mp.ml.robust",
        "ordered_reduce": "hoplite_mp.ml._ordered",
        "proactive": "hoplite_mp.ml._proactive",
    }

    def __getattr__(name: str) -> object:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name, obj=_modules[__name__]
            )
        from importlib import import_module

        try:
            found = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "sklearn":
                raise
            raise ModuleNotFoundError(
                f"hoplite_mp.ml.{name} needs scikit-learn: pip install 'hoplite-mp[ml]'",
                name=error.name,
            ) from error
        return globals().setdefault(name, found)


__all__ = [
    "CSER",
    "DecisionTreeClassifier",
    "DecisionTreeRegressor",
    "FedLinUCB",
    "Feedback",
    "Float16",
    "GaussianMixture",
    "GeometricMedian",
    "Gossip",
    "GroupBy",
    "KMeans",
    "Krum",
    "LinUCBServer",
    "Logistic",
    "LogisticModel",
    "Median",
    "PowerSGD",
    "ProactiveResult",
    "Quantise",
    "RandomBlocks",
    "RandomForestClassifier",
    "Repetition",
    "Score",
    "Threshold",
    "TopK",
    "TrimmedMean",
    "ordered_reduce",
    "proactive",
]


def __dir__() -> list[str]:
    return sorted(__all__)
