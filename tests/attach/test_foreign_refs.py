"""Refs that another engine carries as bytes: the node holds what they name, for a time."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._common.ref import ForwardedHold, ObjectRef
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.clusters import LoopbackCluster

SHORT_S = 0.5
PUTS = """
c._runtime.work_for_an_engine(600.0)
import pickle
ref = c.put(np.arange(300_000.0))
"""


@pytest.fixture
def c(up: LoopbackCluster) -> Iterator[hoplite_mp.Cluster]:
    with up.attach() as made:
        made._runtime.work_for_an_engine(600.0)
        yield made


def bytes_used(c: hoplite_mp.Cluster) -> int:
    return int(c.stats()["bytes_used"])


def test_elsewhere_bytes_hold_nothing(up: LoopbackCluster) -> None:
    with up.attach() as plain:
        ref = plain.put(np.arange(300_000.0))
        data = pickle.dumps(ref)
        del ref
        with pytest.raises(hoplite_mp.ObjectLostError):
            plain.get(pickle.loads(data))


def test_often_loaded(c: hoplite_mp.Cluster) -> None:
    """Each load has a hold of its own; after the first one the object lives as theirs."""
    ref = c.put(np.arange(300_000.0))
    data = pickle.dumps([ref, {"again": ref}])
    name = ref.id
    del ref
    for _ in range(5):
        one, two = pickle.loads(data)
        assert one == two["again"]
        assert one.id == name
        assert c.get(one)[7] == 7.0
        del one, two


def test_who_has_pickled_it_ends_before_it_is_loaded(
    up: LoopbackCluster, c: hoplite_mp.Cluster
) -> None:
    """In order, or killed."""
    for way in ("pass", "os.kill(os.getpid(), 9)"):
        sender = up.driver(f"{PUTS}\nprint(pickle.dumps(ref).hex(), flush=True)\ndel ref\n{way}")
        data = bytes.fromhex(sender.communicate()[0])
        (node,) = c.nodes
        ref = pickle.loads(data)
        assert c.get(ref)[-1] == 299_999.0
        assert c.locations(ref) == [node.id]


def test_a_pending_result_is_held_too(c: hoplite_mp.Cluster) -> None:
    future = c.submit(np.full, 200_000, 3.0)
    data = pickle.dumps(future.ref)
    del future
    assert c.get(pickle.loads(data))[0] == 3.0


def test_an_actor_lives_as_long_as_its_bytes(c: hoplite_mp.Cluster) -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    actor = c.actor(Counter)
    assert actor.add().result() == 1
    data = pickle.dumps(actor)
    del actor
    assert pickle.loads(data).add().result() == 2


def test_never_loaded(up: LoopbackCluster) -> None:
    """The memory returns, and who comes later is told why."""
    with up.attach() as c:
        c._runtime.work_for_an_engine(SHORT_S)
        before = bytes_used(c)
        ref = c.put(np.arange(300_000.0))
        data = pickle.dumps(ref)
        assert bytes_used(c) > before
        del ref
        eventually(lambda: bytes_used(c) <= before, "the memory does not return")
        with pytest.raises(hoplite_mp.ObjectLostError, match=r"node h0 held it for 0\.5 s"):
            pickle.loads(data)


def test_ref_that_is_kept_is_loaded_after_the_hold_has_ended(up: LoopbackCluster) -> None:
    with up.attach() as c:
        c._runtime.work_for_an_engine(SHORT_S)
        kept = c.put(np.arange(300_000.0))
        other = c.put(np.arange(300_000.0))
        data, gone = pickle.dumps(kept), pickle.dumps(other)
        before = bytes_used(c)
        del other
        eventually(lambda: bytes_used(c) < before, "the memory does not return")
        assert pickle.loads(data) == kept
        with pytest.raises(hoplite_mp.ObjectLostError, match="ref_hold_s"):
            pickle.loads(gone)


def test_many_picklings_are_one_hold(c: hoplite_mp.Cluster) -> None:
    """The node is asked once, and told from then on; all of it is gone with the last ref."""
    calls: list[Any] = []
    channel = c._runtime.channel
    call = channel.call

    def counted(ask: Any, *args: Any, **options: Any) -> Any:
        calls.append(type(ask).__name__)
        return call(ask, *args, **options)

    channel.call = counted  # type: ignore[method-assign]
    ref = c.put(7)
    assert len({pickle.dumps(ref) for _ in range(1000)}) == 1
    assert calls.count("HoldForeign") == 1


def test_a_process_without_a_cluster_passes_it_on(c: hoplite_mp.Cluster) -> None:
    """With the words for who loads it too late."""
    ref = c.put(np.arange(300_000.0))
    data = pickle.dumps(ref)
    program = (
        "import pickle, sys; ref = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "print(pickle.dumps(ref).hex(), repr(ref))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, data.hex()], capture_output=True, text=True, check=True
    )
    passed, words = done.stdout.split(maxsplit=1)
    assert ref.id in words
    assert bytes.fromhex(passed) == data
    c.delete(ref)
    assert c.get(c.put(1)) == 1
    del ref
    c._runtime.memory.collect()


def test_who_passes_refs_on_does_not_fail(up: LoopbackCluster) -> None:
    """A scheduler unpickles what is for others: one lost ref is not the end of all the rest."""
    with up.attach() as c:
        c._runtime.work_for_an_engine(SHORT_S)
        ref = c.put(np.arange(300_000.0))
        data = pickle.dumps(ref)
        before = bytes_used(c)
        del ref
        eventually(lambda: bytes_used(c) < before, "the memory does not return")
        with up.attach() as passing:
            passing._runtime.work_for_an_engine(SHORT_S, passes_on=True)
            assert pickle.dumps(pickle.loads(data)) == data
        with pytest.raises(hoplite_mp.ObjectLostError, match="ref_hold_s"):
            pickle.loads(data)


def test_to_pickle_a_ref_of_a_closed_cluster_is_no_error(up: LoopbackCluster) -> None:
    with up.attach() as c:
        c._runtime.work_for_an_engine(SHORT_S)
        ref = c.put(1)
    assert pickle.loads(pickle.dumps(ref)).id == ref.id


@pytest.mark.parametrize("hold", [None, ForwardedHold(0, 5.0)])
def test_a_ref_that_is_the_first_thing_of_this_library_finds_the_engine(hold: object) -> None:
    """An engine's process unpickles arguments before its function has used anything of ours."""
    data = pickle.dumps(ObjectRef(bytes(16), hold))
    body = f"""
import pickle, sys, types
sys.modules["ray"] = types.ModuleType("ray")
front = types.ModuleType("hoplite_mp.integrations.ray._driver")
front.enter = lambda: bool(print("asked"))
sys.modules[front.__name__] = front
import hoplite_mp
assert "hoplite_mp._client.runtime" not in sys.modules
print(pickle.loads({data!r}))
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["asked", f"ObjectRef({'0' * 32})"], done.stderr
