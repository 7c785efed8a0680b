"""Queues and locks where no cluster is open."""

from __future__ import annotations

import os
import pickle

import pytest

import hoplite_mp
from hoplite_mp import ClosedError
from hoplite_mp._sync import sync_actors

CALLS = {
    hoplite_mp.Queue: "qsize",
    hoplite_mp.Lock: "acquire",
    hoplite_mp.Semaphore: "release",
    hoplite_mp.Event: "set",
}


def test_there_is_one_clear_error() -> None:
    for kind in CALLS:
        with pytest.raises(ClosedError, match="no cluster is open"):
            kind()
    with hoplite_mp.Cluster(workers=1):
        made = [kind() for kind in CALLS]
    for one, call in zip(made, CALLS.values(), strict=True):
        with pytest.raises(ClosedError):
            getattr(one, call)()
        assert type(one).__name__ in repr(one)


def test_the_error_of_a_shut_down_queue_travels() -> None:
    error = pickle.loads(pickle.dumps(hoplite_mp.Queue.ShutDown("why")))
    assert type(error) is hoplite_mp.Queue.ShutDown


def test_a_child_forked_while_another_thread_makes_its_life() -> None:
    """Of a lock that its parent holds nothing is left: it may open a cluster of its own."""
    with sync_actors._lock:
        child = os.fork()
        if not child:
            os._exit(0 if sync_actors._lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
