"""Errors: their bases, their public place, and that they survive the way between processes."""

import pickle
from concurrent.futures import BrokenExecutor

import cloudpickle
import pytest

import hoplite_mp
from hoplite_mp import errors

BASES = {
    "ClosedError": RuntimeError,
    "ConfigError": ValueError,
    "TaskError": RuntimeError,
    "ObjectLostError": LookupError,
    "WorkerLostError": BrokenExecutor,
    "NodeLostError": errors.WorkerLostError,
    "PeerLostError": ConnectionError,
    "ManagerLostError": ConnectionError,
    "StoreFullError": MemoryError,
    "HopliteTimeoutError": TimeoutError,
    "ReduceError": RuntimeError,
    "ProtocolError": ConnectionError,
    "AuthError": PermissionError,
}
ALL = ["HopliteError", *BASES]


def test_the_list_is_complete() -> None:
    assert sorted(errors.__all__) == sorted(ALL)


@pytest.mark.parametrize("name", BASES)
def test_each_is_a_domain_error_and_a_builtin_one(name: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, errors.HopliteError)
    assert issubclass(cls, BASES[name])


@pytest.mark.parametrize("name", ALL)
def test_each_is_shown_at_its_public_place(name: str) -> None:
    cls = getattr(errors, name)
    assert cls.__module__ == "hoplite_mp"
    assert getattr(hoplite_mp, name) is cls
    assert cls.__doc__


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("args", [(), ("text",), ("text", 2), (1, "text", "third")])
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_each_pickles_with_its_arguments(name: str, args: tuple[object, ...], module) -> None:
    error = getattr(errors, name)(*args)
    again = pickle.loads(module.dumps(error))
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)


def test_notes_travel_too() -> None:
    error = errors.WorkerLostError("worker 3@h1 was killed")
    error.add_note("while running train()")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while running train()"]
