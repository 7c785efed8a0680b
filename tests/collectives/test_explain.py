"""`explain` on one host: nothing is transferred, and wrong arguments get one clear error."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ObjectLostError
from hoplite_mp._common.ids import pack_id
from hoplite_mp._common.ref import ObjectRef

if TYPE_CHECKING:
    from hoplite_mp import Cluster


def test_reduction_of_one_host_is_told_with_its_size_and_time(cluster: Cluster) -> None:
    parts = [cluster.put(np.ones(1 << 16)) for _ in range(2)]
    total = cluster.reduce(parts)
    cluster.wait(total)
    explained = cluster.explain(total)
    (plan,) = explained.plans
    assert (explained.state, explained.why, explained.locations) == ("ready", "", ("h0",))
    assert (plan.kind, plan.shape, plan.state, plan.last) == ("reduce", "one node", "done", "")
    assert plan.nbytes == explained.nbytes > 1 << 19
    assert plan.elapsed_s is not None
    assert str(explained).startswith("ready, 512")
    assert cluster.explain(parts[0]).why == "no transfer: processes of h0 read it in shared memory"


def test_alternatives_that_look_the_same_are_printed_once(cluster: Cluster) -> None:
    total = cluster.reduce([cluster.put(np.ones(1 << 16)) for _ in range(2)])
    cluster.wait(total)
    (plan,) = cluster.explain(total).plans
    same = ("one owner", 1, 0.5), ("one owner", 1, 0.5)
    assert "compared" not in str(dataclasses.replace(plan, estimates=same))
    text = str(dataclasses.replace(plan, estimates=(*same, ("chain", 1, 1.0))))
    assert "compared: one owner 500 ms, chain 1.00 s\n" in f"{text}\n"


def test_unfinished_and_failed_results_have_a_reason_in_place_of_a_plan(cluster: Cluster) -> None:
    late = cluster.put(np.ones(1))
    gate = cluster.submit(divmod, 1, 0)
    cluster.wait(gate)
    assert cluster.explain(gate).why == "no transfer: there is no value"
    cluster.delete(late)
    assert (cluster.explain(late).state, cluster.explain(late).plans) == ("deleted", ())
    total = cluster.reduce([gate, cluster.put(1.0)])
    cluster.wait(total)
    assert cluster.explain(total).state == "failed"


def test_program_of_a_worker_can_ask_too(cluster: Cluster) -> None:
    ref = cluster.put(np.ones(1 << 16))
    asked = cluster.submit(
        lambda refs: str(hoplite_mp.current().explain(refs[0])), hoplite_mp.by_ref([ref])
    )
    assert "shared memory" in asked.result(60)


def test_what_is_no_object_of_the_cluster_is_refused(cluster: Cluster) -> None:
    stranger: ObjectRef[int] = ObjectRef(pack_id(1 << 62, 1 << 33), None)
    with pytest.raises(ObjectLostError, match="is gone, or belongs to another cluster"):
        cluster.explain(stranger)
    with pytest.raises(TypeError, match="expected a ref or a Future, not int 3"):
        cluster.explain(3)
    with cluster.group("alone", 1, 0) as group:
        call = group.allreduce_async(np.ones(3))
        with pytest.raises(TypeError, match="Future of a Group call has no recorded plan"):
            cluster.explain(call)
        call.result(60)


def test_many_threads_are_answered(cluster: Cluster) -> None:
    ref = cluster.put(np.ones(1 << 16))
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(cluster.explain(ref).state)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["ready"] * 8
