"""What is kept of an actor with checkpoints, and what a process that begins again makes of it."""

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import Actor, ActorLostError
from tests.support.functions import Counter
from tests.support.waiting import eventually


class Kept(Counter):
    """One call in three of `die_after` ends the process after it has changed the state."""

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value, "seen": self.seen, "restored": True}

    def die_after(self, path: str) -> int:
        self.value += 1
        if not os.path.exists(path):
            with open(path, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return self.value

    def is_restored(self) -> bool:
        return hasattr(self, "restored")


class Unpicklable:
    """Its state stops to pickle after the first call."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock: Any = None

    def spoil(self) -> int:
        self.calls += 1
        self.lock = threading.Lock()
        return self.calls

    def mend(self) -> int:
        self.calls += 1
        self.lock = None
        return self.calls


def _kill(handle: Any) -> None:
    os.kill(handle.pid().result(20), signal.SIGKILL)


def _restarted(handle: Any, times: int) -> bool:
    return Actor.restarts(handle) == times


def test_nothing_that_was_seen_is_lost(c: hoplite_mp.Cluster) -> None:
    counter = c.options(restarts=3, checkpoint=1).actor(Kept, 10)
    assert not counter.is_restored().result(20)
    for turn in range(1, 4):
        assert counter.add().result(20) == 10 + turn
        _kill(counter)
        eventually(lambda turn=turn: _restarted(counter, turn))
    assert counter.is_restored().result(20)
    assert counter.add().result(20) == 14


def test_every_k_calls(c: hoplite_mp.Cluster) -> None:
    counter = c.options(restarts=1, checkpoint=5).actor(Kept)
    for i in range(1, 8):
        assert counter.add().result(20) == i
    os.kill(counter.pid().result(20), signal.SIGKILL)  # the eighth call
    eventually(lambda: _restarted(counter, 1))
    assert counter.add().result(20) == 6


def test_a_call_that_is_tried_again_is_applied_once(c: hoplite_mp.Cluster, tmp_path: Any) -> None:
    """The process dies after the call has changed its state, and before that is kept."""
    counter = c.options(restarts=1, retries=1, checkpoint=1).actor(Kept)
    assert [counter.add().result(20) for _ in range(3)] == [1, 2, 3]
    assert counter.die_after(str(tmp_path / "died")).result(20) == 4
    assert counter.add().result(20) == 5
    assert _restarted(counter, 1)


def test_a_call_whose_result_was_kept_is_not_applied_again(c: hoplite_mp.Cluster) -> None:
    """As it is if the process dies between the checkpoint and its result's way out."""
    counter = c.options(restarts=1, checkpoint=1).actor(Kept)
    from hoplite_mp._api.actor import _about_of, _identity_of
    from hoplite_mp._client.actors import CallNumber
    from hoplite_mp._client.runtime import runtime_of
    from hoplite_mp._worker import checkpoints

    identity, about = _identity_of(counter), _about_of(counter)
    actors = runtime_of(identity).actors

    def call(turn: int, method: str) -> Any:
        number = CallNumber(b"somebody", turn, 1)
        args = (number, method)
        return actors.submit(identity, about, checkpoints.call, args, {}, None, False, "call")

    assert call(1, "add").result(20) == 1
    assert isinstance(call(2, "fail").exception(20), KeyError)
    os.kill(counter.pid().result(20), signal.SIGKILL)
    eventually(lambda: _restarted(counter, 1))
    assert call(1, "add").result(20) == 1
    assert isinstance(call(2, "fail").exception(20), KeyError)
    assert call(3, "add").result(20) == 2


def test_arrays_in_the_state_are_writable_again(c: hoplite_mp.Cluster) -> None:
    class Server:
        def __init__(self) -> None:
            self.params = np.zeros(100_000)

        def apply(self, grad: Any) -> Any:
            self.params += grad
            return self.params

        def end(self) -> None:
            os._exit(1)

    server = c.options(restarts=1, checkpoint=1).actor(Server)
    np.testing.assert_array_equal(server.apply(np.ones(100_000)).result(20), np.ones(100_000))
    assert isinstance(server.end().exception(20), ActorLostError)
    np.testing.assert_array_equal(server.apply(1.0).result(20), np.full(100_000, 2.0))


def test_a_state_that_does_not_pickle_is_said(c: hoplite_mp.Cluster) -> None:
    handle = c.options(restarts=1, checkpoint=1).actor(Unpicklable)
    with pytest.raises(TypeError, match=r"state of a Unpicklable.*checkpoint.*does not pickle"):
        handle.spoil().result(20)
    assert handle.mend().result(20) == 2


def test_refs_in_a_state_are_held(c: hoplite_mp.Cluster) -> None:
    counter = c.options(restarts=1, checkpoint=1).actor(Kept)
    counter.note(hoplite_mp.by_ref(c.put(np.arange(1000)))).result(20)
    _kill(counter)
    eventually(lambda: _restarted(counter, 1))
    (ref,) = counter.notes().result(20)
    np.testing.assert_array_equal(c.get(ref), np.arange(1000))


def test_states_are_freed(c: hoplite_mp.Cluster) -> None:
    before = c.stats()["bytes_used"]
    counter = c.options(restarts=1, checkpoint=1).actor(Kept)
    for _ in range(20):
        counter.note(np.zeros(20_000)).result(20)
    del counter
    eventually(lambda: c.stats()["bytes_used"] <= before + 1_000_000)


@pytest.mark.parametrize("checkpoint", [0, -1, 1.5, "2"])
def test_mistakes(c: hoplite_mp.Cluster, checkpoint: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="checkpoint"):
        c.options(checkpoint=checkpoint)
