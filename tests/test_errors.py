"""Errors: their bases, their public place, and that they survive the way between processes."""

import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import cloudpickle
import msgspec
import pytest

import hoplite_mp
from hoplite_mp import errors

BASES = {
    "ClosedError": RuntimeError,
    "ConfigError": ValueError,
    "TaskError": RuntimeError,
    "ObjectLostError": LookupError,
    "WorkerLostError": BrokenProcessPool,
    "ActorLostError": errors.WorkerLostError,
    "NodeLostError": errors.WorkerLostError,
    "PeerLostError": ConnectionError,
    "ManagerLostError": ConnectionError,
    "StoreFullError": MemoryError,
    "StateNotSavedError": errors.StoreFullError,
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


def program(text: str) -> str:
    """What it prints: "late" where it says so only if the standard library's pool is imported."""
    text = "import sys\nlate = lambda: 'concurrent.futures.process' in sys.modules\n" + text
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def test_the_errors_of_lost_workers_are_made_at_their_first_use() -> None:
    assert program("""
import hoplite_mp, hoplite_mp.errors
def look():
    return late()
class Cut:
    def __reduce__(self): raise ValueError
with hoplite_mp.Cluster(workers=1) as cluster:
    print(late(), cluster.submit(look).result(30))
    try:
        cluster.submit(divmod, 1, 0).result(30)
    except ZeroDivisionError:
        pass
    with cluster.executor(1) as own:
        print(own.submit(look).result(30))
    [peer] = cluster.spmd(lambda rank: rank, 1)
    peer.result(30)
print(late(), "WorkerLostError" in dir(hoplite_mp))
print(hoplite_mp.NodeLostError.__mro__[1] is hoplite_mp.WorkerLostError, late())
""").split() == ["False", "False", "False", "False", "True", "True", "True"]


def test_whoever_uses_them_first_finds_the_same_classes() -> None:
    for first in ("hoplite_mp.WorkerLostError", "hoplite_mp.errors.NodeLostError"):
        assert program(f"""
import threading, hoplite_mp
from hoplite_mp import errors
found, barrier = [], threading.Barrier(8)
def use():
    barrier.wait()
    found.append(({first}, hoplite_mp.WorkerLostError, errors.WorkerLostError))
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(set(found)))
import pickle
from concurrent.futures.process import BrokenProcessPool
try:
    raise pickle.loads(pickle.dumps(hoplite_mp.NodeLostError("h1", 2)))
except BrokenProcessPool as error:
    print(error.args, isinstance(error, hoplite_mp.HopliteError))
""").splitlines() == ["1", "('h1', 2) True"]


def test_a_process_without_descriptors_can_tell_what_it_has_lost() -> None:
    assert program("""
import os, resource, hoplite_mp
hoplite_mp.Cluster  # what it has lost was one
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
while True:
    try:
        os.dup(0)
    except OSError:
        break
print(issubclass(hoplite_mp.NodeLostError, hoplite_mp.HopliteError), late())
""").split() == ["True", "False"]


def test_other_names_are_missing_as_ever() -> None:
    for module in (hoplite_mp, errors):
        with pytest.raises(AttributeError, match="no attribute 'LostError'"):
            module.LostError  # noqa: B018


def test_a_tree_that_was_not_built_says_so(tmp_path: Path) -> None:
    """As PYTHONPATH finds it in a clone before `make build`."""
    package = Path(hoplite_mp.__file__).parent
    shutil.copytree(package, tmp_path / "hoplite_mp", ignore=shutil.ignore_patterns("*.so"))
    for code in ("import hoplite_mp; hoplite_mp.Cluster", "from hoplite_mp import Group"):
        # Without -S an installation that is editable would lend its compiled modules.
        path = os.pathsep.join([str(tmp_path), str(Path(msgspec.__file__).parents[1])])
        ended = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        assert ended.returncode
        assert f"are missing in {tmp_path / 'hoplite_mp'}: run `make build`" in ended.stderr
        assert "installed, run Python in another directory" in ended.stderr
