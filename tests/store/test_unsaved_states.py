"""Actors whose state finds no room: the call says that it has taken effect."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import Actor, StateNotSavedError, StoreFullError
from tests.support.store import open_spilling, spilled_array
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster


class Growing:
    """Its state grows by 2 MiB with each call."""

    def __init__(self) -> None:
        self.calls = 0
        self.parts: list[Any] = []

    def grow(self) -> int:
        self.calls += 1
        self.parts.append(np.zeros(1 << 18))
        return self.calls

    def fail(self) -> None:
        self.grow()
        raise KeyError(self.calls)

    def count(self) -> int:
        return self.calls

    def pid(self) -> int:
        return os.getpid()


def fill(c: Cluster) -> list[Any]:
    refs: list[Any] = []
    with pytest.raises(StoreFullError):
        refs += (c.put(spilled_array(seed)) for seed in range(20))
    return refs


@pytest.mark.parametrize("method", ["grow", "fail"])
@pytest.mark.parametrize("retry", [(), MemoryError])
def test_call_whose_state_cannot_be_saved_raises_that_it_took_effect(
    tiny_disk: Path, method: str, retry: Any
) -> None:
    with open_spilling(tiny_disk, put_wait_s=0.3) as c:
        view = c.options(
            restarts=2, checkpoint=1, retry_exceptions=retry, retries=1 if retry else 0
        )
        actor = view.actor(Growing)
        assert actor.grow().result(PATIENCE_S) == 1
        refs = fill(c)
        with pytest.raises(StateNotSavedError) as caught:
            getattr(actor, method)().result(PATIENCE_S)
        text = str(caught.value)
        assert f"Growing.{method}() has taken effect" in text
        assert "could not be saved" in text
        assert "Do not repeat the call" in text
        with pytest.raises(StateNotSavedError):  # it saves too, and finds no room either
            actor.count().result(PATIENCE_S)
        refs.clear()
        assert actor.count().result(PATIENCE_S) == 2  # applied once, and saved now
        os.kill(actor.pid().result(PATIENCE_S), signal.SIGKILL)
        eventually(lambda: Actor.restarts(actor) == 1)
        assert actor.count().result(PATIENCE_S) == 2


def test_death_before_the_state_is_saved_goes_back_to_the_last_one(tiny_disk: Path) -> None:
    with open_spilling(tiny_disk, put_wait_s=0.3) as c:
        actor = c.options(restarts=2, checkpoint=1).actor(Growing)
        assert actor.grow().result(PATIENCE_S) == 1
        pid = actor.pid().result(PATIENCE_S)
        refs = fill(c)
        with pytest.raises(hoplite_mp.StateNotSavedError):
            actor.grow().result(PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: Actor.restarts(actor) == 1)
        refs.clear()
        assert actor.count().result(PATIENCE_S) == 1
