"""What stands at a prompt: Cluster, Node, ObjectRef and refusals, in a line, and without a wait."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cluster() -> Iterator[hoplite_mp.Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as cluster:
        yield cluster


def fail() -> None:
    raise ValueError("a mistake")


def test_refs(cluster: hoplite_mp.Cluster, tmp_path: Path) -> None:
    def words(ref: Any) -> str:
        head, _, found = repr(ref).partition(": ")
        assert head == f"ObjectRef({ref.id}"
        assert str(ref) == f"{head})"
        return found.removesuffix(")")

    array = cluster.put(np.zeros((1000, 3), np.float32))
    assert words(array) == "float32 (1000, 3), 11.8 KiB, ready on h0"
    assert words(cluster.put(np.float64(1))).startswith("float64, ")
    assert words(cluster.put(b"x" * 1000)).startswith("bytes, ")
    assert words(cluster.put({"a": 1})).startswith("object, ")
    waiting = cluster.submit(pow, 2, cluster.submit(_later, tmp_path / "go").ref)
    assert words(waiting.ref) == "pending"
    (tmp_path / "go").touch()
    assert waiting.result() == 4
    failed = cluster.submit(fail)
    concurrent.futures.wait([failed], 60)
    assert repr(failed).endswith(" finished raised ValueError>")
    assert failed.exception() is not None
    assert repr(failed).endswith(" finished raised ValueError>")
    assert repr(cluster.submit(pow, 2, 2)).startswith("<Future ")
    fine = cluster.submit(pow, 2, 2)
    concurrent.futures.wait([fine], 60)
    assert repr(fine).endswith(" finished>")
    assert fine.result() == 4
    assert repr(fine).endswith(" finished>")
    assert words(failed.ref) == "failed"
    cluster.delete(array)
    assert words(array) == "deleted"
    cluster.shutdown()
    assert repr(array) == f"ObjectRef({array.id})"


def _later(path: Path) -> int:
    wait_for(path)
    return 2


def test_a_spilled_one(tmp_path: Any) -> None:
    with hoplite_mp.Cluster(workers=1, memory="16MiB", spill_dir="/var/tmp") as cluster:
        refs = [cluster.put(np.zeros(4 << 20, np.uint8)) for _ in range(6)]
        found = [repr(ref) for ref in refs]
        assert any("4.0 MiB, ready on another host or on disk" in one for one in found), found
        assert all("ready on" in one for one in found)


def test_of_another_cluster(cluster: hoplite_mp.Cluster) -> None:
    ref = hoplite_mp.ObjectRef(bytes(range(16)))
    assert repr(ref) == f"ObjectRef({ref.id})"


def test_cluster_and_node(cluster: hoplite_mp.Cluster) -> None:
    assert repr(cluster) == "<hoplite_mp.Cluster: 1 worker on this host, store of 64 MiB>"
    assert repr(cluster.options(retries=1)) == repr(cluster)
    (node,) = cluster.nodes
    assert repr(node).startswith(f"Node(h0 at 127.0.0.1, {os.uname().nodename}: 1 worker, ")
    assert repr(node).endswith(" of 64 MiB used)")
    assert "in worker " in cluster.submit(lambda: repr(hoplite_mp.current())).result()
    view = cluster.options(retries=1)
    cluster.shutdown()
    assert repr(cluster) == repr(view) == "<hoplite_mp.Cluster: closed>"
    assert repr(hoplite_mp.Cluster.__new__(hoplite_mp.Cluster)) == "<hoplite_mp.Cluster: closed>"


def test_a_node_that_stands_still_is_not_asked(cluster: hoplite_mp.Cluster) -> None:
    """Also while another thread waits for it, with the line to the node in its hands."""
    ref = cluster.put(np.zeros(10))
    assert len(cluster.nodes) == 1  # it has begun
    node = cluster._runtime.tasks.pid(0)
    assert node > 0
    asks = threading.Thread(target=lambda: cluster.nodes)
    os.kill(node, signal.SIGSTOP)
    try:
        asks.start()
        assert "float64 (10,)" in repr(ref)
        assert "1 worker on this host" in repr(cluster)
        assert asks.is_alive()
    finally:
        os.kill(node, signal.SIGCONT)
        asks.join()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((1000, 1000), np.float32), "not numpy.ndarray of float32, shape (1000, 1000). "),
        ([np.zeros((50, 2))], "not numpy.ndarray of float64, shape (50, 2). "),
        ([np.float32(1.5)], "not numpy.float32 of float32, shape (). "),
        ("a" * 1000, "not str 'aaaaaaaaaaaa...aaaaaaaaaaaaa'. "),
        (7, "not int 7. "),
        ([[1, 2, 3]], "not list of 3 items. "),
        ([object()], "not object. "),
    ],
)
def test_a_value_where_a_ref_is_expected(
    cluster: hoplite_mp.Cluster, value: Any, words: str
) -> None:
    calls = (cluster.delete, cluster.reduce, cluster.gather)
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call(value)
        assert words in str(caught.value)
        assert "Refs among a task's arguments are replaced by their values" in str(caught.value)
        assert "hoplite_mp.by_ref(ref)" in str(caught.value)
        assert len(str(caught.value)) < 400
