"""Reference counts: an object goes with its last ref, wherever that is."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import echo, pid_of_worker
from tests.support.store import client, header, held, local_id, objects, warm
from tests.support.values import MIB, mib
from tests.support.waiting import eventually, falls_to, settles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster, ObjectRef

SPANS_MAX = 8  # a few size classes in each of two processes
kept: list[Any] = []  # of a worker: what it keeps between tasks


def keep(*values: Any) -> int:
    kept.extend(values)
    return os.getpid()


def drop_all(*_: Any) -> int:
    kept.clear()
    gc.collect()
    return os.getpid()


def make_ref(value: Any) -> ObjectRef[Any]:
    return hoplite_mp.current().put(value)


def make_refs(count: int, nbytes: int) -> Any:
    c = hoplite_mp.current()
    return [c.put(np.full(nbytes, number, np.uint8)) for number in range(count)]


class Carrying(Exception):
    """An exception with refs in it."""


def raise_ref(value: Any) -> Any:
    raise Carrying(make_ref(value))


def read(ref: Any) -> Any:
    return hoplite_mp.current().get(ref)


def keep_refs(*_: Any) -> None:
    kept.append([make_refs(5, 100_000), make_refs(5, 100)])


def read_inside(box: Any) -> Any:
    return hoplite_mp.current().get(box.ref)


class Box:
    """Refs in it are not resolved when it is an argument."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref


@pytest.fixture
def one() -> Iterator[Cluster]:
    """A worker of one's own: which process a task runs in is certain, and it may be killed."""
    with hoplite_mp.Cluster(workers=1, memory="128MiB") as made:
        warm(
            made,
            keep,
            drop_all,
            make_ref,
            raise_ref,
            echo,
            pid_of_worker,
            read,
            time.sleep,
            keep_refs,
        )
        made.wait(made.submit(read_inside, Box(made.put(1))))
        made.wait(made.submit(make_refs, 1, 1))
        made.submit(drop_all).result()
        settles(lambda: objects(made), len(made._runtime.submitter._functions))
        yield made


def test_everything_dropped_is_the_baseline(one: Cluster) -> None:
    c = one
    before = objects(c)
    use_and_drop(c, before)
    assert c.stats()["bytes_used"] % MIB == 0, "nothing is left but spans"
    for _ in range(3):
        use_and_drop(c, before)
    used = c.stats()["bytes_used"]  # an idle worker gives spans back, so their number varies
    assert used % MIB == 0
    assert used <= SPANS_MAX * MIB


def use_and_drop(c: Cluster, before: int) -> None:
    refs = [c.put(x) for x in (1, np.arange(1000), mib(2), {"a": mib(1)}, [1, 2])]
    assert objects(c) == before + len(refs)
    nested = c.put([refs, {"in": c.put(refs[0])}])
    futures = [c.submit(echo, ref) for ref in [*refs, nested]]
    results = [future.result() for future in futures]
    assert objects(c) == before + len(refs) + 2 + len(futures)
    del refs, nested, futures, results
    settles(lambda: objects(c), before)


def test_counts_of_this_process(one: Cluster) -> None:
    ref = one.put(mib(1))
    assert held(one, ref) == (1, 0)
    same = [ref, copy.copy(ref), copy.deepcopy(ref)]
    assert held(one, ref) == (1, 0), "copies are the same ref"
    box = [one.get(one.put([ref, ref])) for _ in range(2)]  # those objects are gone already
    assert held(one, ref)[0] == 3
    array, view = one.get(ref), one.get(ref)[5:]
    assert held(one, ref)[1] == 2
    assert header(one, ref)["pins"] == [client(one).slot]
    del array
    assert held(one, ref)[1] == 1
    del view, box, same
    one.stats()
    assert held(one, ref) == (1, 0)
    assert header(one, ref)["pins"] == []


def test_refs_inside_refs_hold_to_any_depth(one: Cluster) -> None:
    before = objects(one)
    inner = one.put(mib(1))
    oid = local_id(one, inner)
    outer: Any = inner
    for _ in range(20):
        outer = one.put({"next": outer})
    del inner
    assert objects(one) == before + 21
    assert client(one).inspect(oid)["state"] == "SEALED"
    value = outer
    for _ in range(20):
        value = one.get(value)["next"]
    assert (one.get(value) == mib(1)).all()
    del value, outer
    settles(lambda: objects(one), before)


def test_a_deletion_in_the_middle_frees_what_is_below(one: Cluster) -> None:
    before = objects(one)
    middle = one.put([one.put([one.put(1), one.put(mib(1))])])
    top = one.put([middle])
    assert objects(one) == before + 5
    one.delete(middle)
    settles(lambda: objects(one), before + 2)
    del middle
    assert objects(one) == before + 2, "the deleted name is still inside of another object"
    del top
    settles(lambda: objects(one), before)


def test_arguments_hold_until_the_task_is_done(one: Cluster) -> None:
    before = objects(one)
    blocker = one.submit(time.sleep, 0.2)
    futures = [
        one.submit(echo, one.put(5)),
        one.submit(echo, [one.put(6), {"x": one.put(7)}]),
        one.submit(read_inside, Box(one.put(8))),
        one.submit(read_inside, x := Box(one.put(9))),
        one.submit(read, hoplite_mp.by_ref(one.put(10))),
        one.submit(echo, one.submit(echo, one.put(11))),
    ]
    x.ref = None
    assert [future.result() for future in futures] == [5, [6, {"x": 7}], 8, 9, 10, 11]
    del futures, blocker
    gc.collect()
    falls_to(lambda: objects(one), before)


def test_a_worker_that_keeps_a_ref_holds_it(one: Cluster) -> None:
    ref = one.put(mib(1))
    oid, slot = local_id(one, ref), client(one).slot
    one.submit(keep, Box(ref)).result()
    (worker,) = set(header(one, ref)["refs"]) - {slot}
    del ref
    one.stats()
    assert client(one).inspect(oid)["refs"] == [worker]
    assert client(one).inspect(oid)["state"] == "SEALED"
    one.submit(drop_all).result()
    settles(lambda: client(one).inspect(oid)["state"] in ("FREE", "FREED"), True)


def test_a_dead_workers_refs_and_pins_go_with_it(one: Cluster) -> None:
    before = objects(one)
    ref = one.put(mib(1))
    victim = one.submit(keep, Box(ref), ref, make_ref).result()
    one.submit(keep_refs).result()
    oid, slot = local_id(one, ref), client(one).slot
    settles(lambda: len(client(one).inspect(oid)["pins"]), 1)
    assert objects(one) > before + 10
    os.kill(victim, signal.SIGKILL)
    settles(lambda: [client(one).inspect(oid)[k] for k in ("pins", "refs")], [[], [slot]])
    assert (one.get(ref) == mib(1)).all()
    del ref
    falls_to(lambda: objects(one), before)
    assert one.submit(pid_of_worker).result() != victim


@pytest.mark.parametrize("nbytes", [10, 5000, 200_000])
def test_a_result_with_refs_whose_worker_dies_at_once(one: Cluster, nbytes: int) -> None:
    """Nobody has looked at the result when the worker dies: the refs in it were held by it."""
    worker = one.submit(pid_of_worker).result()
    warm(one, echo)
    before = objects(one)
    future = one.submit(make_refs, 6, nbytes)
    oid = local_id(one, future.ref)
    eventually(lambda: client(one).inspect(oid)["state"] == "SEALED", "the result")
    os.kill(worker, signal.SIGKILL)
    assert one.submit(pid_of_worker).result() != worker
    values = one.get(one.get(future))
    assert [(len(value), set(value.tolist())) for value in values] == [
        (nbytes, {number}) for number in range(6)
    ]
    again = one.submit(lambda refs: [int(r[0]) for r in refs], list(one.get(future))).result()
    assert again == list(range(6))
    del future, values
    falls_to(lambda: objects(one), before + 2)


def test_refs_in_results_and_in_exceptions(one: Cluster) -> None:
    before = objects(one)
    future = one.submit(make_ref, mib(1))
    assert (one.get(future.result()) == mib(1)).all()
    failing = one.submit(raise_ref, 41)
    with pytest.raises(Carrying) as caught:
        failing.result()
    assert one.get(caught.value.args[0]) == 41
    assert one.submit(echo, one.put(one.submit(make_ref, 43).result())).result() is not None
    assert objects(one) >= before + 4
    del future, failing, caught
    gc.collect()
    falls_to(lambda: objects(one), before)


def test_a_closure_alone_holds_what_it_needs(one: Cluster) -> None:
    before = objects(one)

    def make() -> Any:
        ref = one.put(7)
        return lambda: hoplite_mp.current().get(ref)

    blocker = one.submit(time.sleep, 0.1)
    assert one.submit(make()).result() == 7
    del blocker
    gc.collect()
    falls_to(lambda: objects(one), before)


def test_a_foreign_pickle_holds_nothing(one: Cluster) -> None:
    ref = one.put(5)
    data = pickle.dumps(ref)
    again = pickle.loads(data)
    assert again == ref
    assert held(one, ref)[0] == 2
    del again
    before = objects(one)
    del ref
    assert objects(one) == before - 1
    late = pickle.loads(data)
    with pytest.raises(hoplite_mp.ObjectLostError):
        one.get(late)
    with pytest.raises(hoplite_mp.ObjectLostError):
        one.submit(echo, late).result()


def test_an_old_name_never_means_a_new_object(one: Cluster) -> None:
    """The header is used again at once; the name's generation tells."""
    ref = one.put(1)
    data = pickle.dumps(ref)
    index = local_id(one, ref) >> 32
    del ref
    fresh = [one.put(number) for number in range(50)]
    assert index in {local_id(one, ref) >> 32 for ref in fresh}
    with pytest.raises(hoplite_mp.ObjectLostError):
        one.get(pickle.loads(data))
    assert one.get(fresh) == list(range(50))


def test_a_dropped_future_lets_its_result_go(one: Cluster) -> None:
    before = objects(one)
    for _ in range(20):
        one.submit(echo, 1)
    one.submit(make_ref, 1)
    one.submit(raise_ref, 1)
    falls_to(lambda: objects(one), before)


def test_many_objects_come_and_go(one: Cluster) -> None:
    """Headers and small blocks are used again and again."""
    before, spans = objects(one), one.stats()["bytes_used"]
    for _ in range(5):
        refs = [one.put(np.full(600, number)) for number in range(2000)]
        assert all(int(one.get(ref)[0]) == number for number, ref in enumerate(refs))
        del refs
    falls_to(lambda: objects(one), before)
    assert one.stats()["bytes_used"] <= spans + 12 * MIB
