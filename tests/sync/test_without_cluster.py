"""Queues and locks where no cluster is open."""

from __future__ import annotations

import pickle

import pytest

import hoplite_mp
from hoplite_mp import ClosedError


@pytest.mark.parametrize(
    "kind", [hoplite_mp.Queue, hoplite_mp.Lock, hoplite_mp.Semaphore, hoplite_mp.Event]
)
def test_there_is_one_clear_error(kind: type) -> None:
    with pytest.raises(ClosedError, match="no cluster is open"):
        kind()
    with hoplite_mp.Cluster(workers=1):
        made = kind()
    call = {hoplite_mp.Queue: "qsize", hoplite_mp.Event: "set"}.get(kind, "acquire")
    with pytest.raises(ClosedError):
        getattr(made, call)()
    assert kind.__name__ in repr(made)


def test_the_error_of_a_shut_down_queue_travels() -> None:
    error = pickle.loads(pickle.dumps(hoplite_mp.Queue.ShutDown("why")))
    assert type(error) is hoplite_mp.Queue.ShutDown
