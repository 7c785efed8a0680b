"""Ctrl-C at every point of a call: nothing that the call has begun is left behind.

The interpreter raises KeyboardInterrupt after certain instructions. Here a trace function does
that, at the first such place of a call, then at the second, until the call gets through: every
point is met, in a second or two. Afterwards there are as many objects and bytes as before.
"""

from __future__ import annotations

import gc
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._protocol.local import OpenPool, Request
from tests.support.functions import add
from tests.support.interruptions import interrupted
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster


STRIDE = 3


@pytest.fixture(params=[0, *(pytest.param(at, marks=pytest.mark.soak) for at in range(1, STRIDE))])
def first(request: pytest.FixtureRequest) -> int:
    """The first place: together the runs interrupt a call at every place."""
    place: int = request.param
    return place


@pytest.fixture
def alone() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as made:
        made.submit(abs, -1).result(PATIENCE_S)
        yield made


def counts(c: Any) -> tuple[int, int, int]:
    """Objects, bytes, and headers that are in use."""
    gc.collect()
    stats = c.stats()
    return stats["objects"], stats["bytes_used"], len(c._runtime.client.scan())


def at_rest(c: Any) -> tuple[int, int, int]:
    """When nothing is under way any more."""
    found = counts(c)
    while True:
        time.sleep(0.1)
        before, found = found, counts(c)
        if found == before and not c._runtime.submitter.pending:
            return found


def settled(c: Any, wanted: tuple[int, int, int]) -> None:
    """No more of anything; less, where what was let go of earlier has been collected meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = counts(c)
        if all(a <= b for a, b in zip(found, wanted, strict=True)):
            return
        if time.monotonic() > deadline:
            states = [(h["state"], h["kind"], h["refs"]) for h in c._runtime.client.scan()]
            pytest.fail(f"{found} objects, bytes and headers, not {wanted}: {states}")
        time.sleep(0.01)


def check(c: Any, first: int, call: Callable[[], Any]) -> None:
    """Interrupts the call at every third place, and wants nothing left behind."""
    for _ in range(3):
        call()  # what is made once
    before = at_rest(c)
    at = first
    while interrupted(call, at):
        at += STRIDE
    assert at > 10
    settled(c, before)


def test_put_of_a_small_value(alone: Cluster, first: int) -> None:
    check(alone, first, lambda: alone.put(7))
    check(alone, first, lambda: alone.put(np.ones(10)))


def test_put_of_a_value_in_a_span(alone: Cluster, first: int) -> None:
    check(alone, first, lambda: alone.put(b"x" * 5000))


def test_put_of_refs(alone: Cluster, first: int) -> None:
    inner = alone.put(1)
    check(alone, first, lambda: alone.put([inner]))


def test_put_of_a_large_array(alone: Cluster, first: int) -> None:
    array = np.ones(200_000)
    check(alone, first, lambda: alone.put(array))


def test_put_without_a_copy(alone: Cluster, first: int) -> None:
    def publish() -> None:
        array = alone.empty(1000)
        array.fill(1.0)
        alone.put(array)

    check(alone, first, publish)


def test_reduce(alone: Cluster, first: int) -> None:
    refs = [alone.put(np.ones(10)) for _ in range(2)]
    check(alone, first, lambda: alone.reduce(refs))
    check(alone, first, lambda: alone.reduce_scatter(refs))
    check(alone, first, lambda: alone.broadcast(refs[0]))


def test_submit(alone: Cluster, first: int) -> None:
    """Also with arguments that are objects, and such that are still to come."""
    ref = alone.put(1)
    check(alone, first, lambda: alone.submit(abs, -1))
    check(alone, first, lambda: alone.submit(add, ref, 1))
    check(alone, first, lambda: alone.submit(add, alone.submit(abs, -1), 1))
    check(alone, first, lambda: alone.submit(len, b"x" * 5000))


def test_get(alone: Cluster, first: int) -> None:
    ref = alone.put(np.ones(5000))
    check(alone, first, lambda: alone.get(ref))
    check(alone, first, lambda: alone.submit(abs, -1).result(PATIENCE_S))


def test_iterations(alone: Cluster, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is left among those who are to be told, and no bar."""
    ref = alone.put(1)
    check(alone, first, lambda: list(hoplite_mp.as_completed([alone.submit(abs, -1), ref])))
    if find_spec("tqdm"):
        check(alone, first, lambda: list(alone.map(abs, [-1, -2], chunksize=1, progress=True)))
        from tqdm import tqdm

        assert not tqdm._instances
    deadline = time.monotonic() + PATIENCE_S
    while alone._runtime.submitter.waits:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pools(c: Cluster) -> list[int]:
    """Those that have workers, or may have."""
    return [pool for pool in range(1, 256) if c._runtime.tasks.pool_state(pool)]


def closed(c: Cluster, wanted: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while pools(c) != wanted:
        assert time.monotonic() < deadline, pools(c)
        time.sleep(0.01)


def test_an_executor_of_which_nobody_hears_is_closed(alone: Cluster) -> None:
    """Ctrl-C came when the node had opened it, before its answer was read."""
    channel, wanted = alone._runtime.channel, pools(alone)
    channel._number += 1
    ask = OpenPool(1, 0, 0, [], False)
    channel._sock.send(channel._encoder.encode(Request(channel._number, channel._seen[0], ask)))
    while pools(alone) == wanted:
        time.sleep(0.01)
    alone.nodes  # noqa: B018 -- with the next request the node hears that nobody has it
    closed(alone, wanted)


@pytest.mark.soak
def test_an_executor_is_closed(alone: Cluster) -> None:
    at, wanted = 0, pools(alone)
    while interrupted(lambda: alone.executor(1), at):
        at += 1
        gc.collect()
        alone.nodes  # noqa: B018
    assert at > 10
    gc.collect()
    closed(alone, wanted)
