"""What everybody waits for on one host, as values and as lines of text."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import hoplite_mp
from hoplite_mp._cli import dump
from hoplite_mp._node.diagnostics.waits import WAITS_MAX
from hoplite_mp._protocol.local import Dump, Reply
from tests.support.waiting import eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster


def looked(cluster: Cluster, stacks: bool = False) -> dict[str, Any]:
    """What the one node says."""
    found = dump.collect(cluster, stacks)
    assert found["silent"] == []
    (node,) = found["nodes"]
    return dict(node)


def until(cluster: Cluster, kind: str, condition: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """All of that kind, as soon as the condition holds for them."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = looked(cluster)[kind]["first"]
        return condition(found)

    eventually(look)
    return found


def text(cluster: Cluster) -> str:
    return "\n".join(dump.lines(dump.collect(cluster)))


def add(*parts: Any) -> Any:
    return sum(parts)


def test_a_task_that_runs_one_that_waits_and_one_in_the_queue(
    cluster: Cluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    running = [cluster.submit(wait_for, go) for _ in range(2)]
    # A worker has claimed a task a moment before the task is on its stack.
    until(cluster, "running", lambda found: len(found) == 2)
    queued = cluster.submit(wait_for, go)
    ready = cluster.put(1)
    waiting = cluster.options(name="the sum").submit(add, running[0], ready, queued)
    try:
        found = looked(cluster)
        shown = {one["id"]: one for one in found["running"]["first"]}
        pids = {pid for pid in (one["on"] for one in shown.values())}
        assert shown.keys() == {future.ref.id for future in running}
        assert {one["name"] for one in shown.values()} == {"wait_for"}
        assert all(re.fullmatch(r"worker \d+ \(pid \d+\)", on) for on in pids)
        assert len(pids) == 2
        assert all(0 <= one["seconds"] < 60 for one in shown.values())
        (one,) = found["queued"]["first"]
        assert (one["id"], one["name"], one["pool"]) == (queued.ref.id, "wait_for", 0)
        (one,) = found["waiting"]["first"]
        assert (one["id"], one["name"], one["missing"]) == (waiting.ref.id, "the sum", 2)
        assert [need["id"] for need in one["needs"]] == [running[0].ref.id, queued.ref.id]
        assert one["needs"][0]["where"] == (
            f"the result of wait_for(), which runs on {shown[running[0].ref.id]['on']}"
        )
        assert one["needs"][1]["where"] == "the result of wait_for(), which is queued"
        lines = text(cluster).split("\n")
        assert lines[0].startswith("h0 (")
        assert sum(" runs for " in line for line in lines) == 2
        (line,) = [line for line in lines if waiting.ref.id in line]
        assert line.startswith(f"  task the sum() {waiting.ref.id} waits for ")
        assert "submitted by the driver (pid" in line
    finally:
        go.touch()
    cluster.wait([*running, queued])
    assert isinstance(waiting.exception(), TypeError)  # a path and a number
    # The result is there a moment before the task has left its worker's stack.
    eventually(lambda: text(cluster).split("\n")[1:] == ["  no waits"])


def test_who_waits_inside_a_task(cluster: Cluster, tmp_path: Path) -> None:
    """The worker counts as blocked; its process says for what, the task stays on its stack."""
    go = tmp_path / "go"

    def get(refs: Any) -> Any:
        return hoplite_mp.current().get(refs)

    inner = cluster.submit(wait_for, go)
    until(cluster, "running", lambda found: len(found) == 1)
    outer = cluster.submit(get, hoplite_mp.by_ref([inner.ref]))
    try:
        # It counts as blocked first, and then says for what.
        waits = lambda found: any(one["blocked"] and one["id"] for one in found)  # noqa: E731
        found = until(cluster, "processes", waits)
        (one,) = [one for one in found if one["blocked"]]
        assert (one["task"], one["id"], one["more"]) == ("get", inner.ref.id, 0)
        assert one["where"].startswith("the result of wait_for(), which runs on worker")
        (line,) = [line for line in text(cluster).split("\n") if " waits in get()" in line]
        assert inner.ref.id in line
    finally:
        go.touch()
    assert outer.result() == [str(go)]


def test_a_task_inside_a_task(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def around(path: Any) -> Any:
        c = hoplite_mp.current()
        futures = [c.submit(wait_for, path) for _ in range(1)]
        return c.get(futures)

    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        outer = c.submit(around, go)
        try:
            found = until(c, "running", lambda found: len(found) == 2)
            assert [(one["name"], one["inside"]) for one in found] == [
                ("around", 0), ("wait_for", 1),
            ]  # fmt: skip
            assert found[0]["id"] == outer.ref.id
            assert found[0]["on"] == found[1]["on"]
            assert ", nested in 1 task" in text(c)
        finally:
            go.touch()
        outer.result()


def test_a_group_that_does_not_fill(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def member(rank: int) -> Any:
        with hoplite_mp.current().group("alone", 3, rank) as g:
            try:
                g.barrier()
            except hoplite_mp.HopliteTimeoutError:
                return None
        return rank

    future = cluster.submit(member, 1)
    found = until(cluster, "groups", lambda found: len(found) == 1)
    (group,) = found
    assert (group["name"], group["size"], group["formed"]) == ("alone", 3, False)
    assert [(m["rank"], m["node"]) for m in group["joined"]] == [(1, 0)]
    line = next(line for line in text(cluster).split("\n") if "group" in line)
    pid = group["joined"][0]["pid"]
    assert line == (
        f"  group 'alone' of size 3: joined: 1 (pid {pid} at h0); waiting for ranks 0, 2"
    )
    others = [cluster.submit(member, rank) for rank in (0, 2)]
    assert [f.result() for f in [others[0], future, others[1]]] == [0, 1, 2]
    until(cluster, "groups", lambda found: not found)
    assert not go.exists()


def test_a_group_of_which_one_does_not_call(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def member(rank: int) -> float:
        g = hoplite_mp.current().group("late", 2, rank)
        g.barrier()
        if rank:
            wait_for(go)
        return float(g.allreduce(np.ones(1))[0])

    futures = [cluster.submit(member, rank) for rank in range(2)]
    try:
        found = until(
            cluster, "groups", lambda f: [(one["call"], one["made"]) for one in f] == [(1, [0])]
        )
        assert found[0]["awaited"] == [1]
        assert "call 1 made by rank 0, waiting for rank 1" in text(cluster)
    finally:
        go.touch()
    assert [future.result() for future in futures] == [2.0, 2.0]


def test_messages_that_nobody_receives(cluster: Cluster) -> None:
    with cluster.group("unread", 2, 0) as first, cluster.group("unread", 2, 1) as second:
        for at in range(3):
            first.send(at, 1)
        until(cluster, "groups", lambda f: f[0]["unread"] == [{"rank": 1, "messages": 3}])
        assert "; 3 unread for rank 1; call 0 not made by any rank on this host" in text(cluster)
        assert [second.recv() for _ in range(3)] == [0, 1, 2]
        until(cluster, "groups", lambda f: f[0]["unread"] == [])


def test_a_reduce_with_missing_sources(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def late(path: Any) -> float:
        wait_for(path)
        return 1.0

    sources = [cluster.put(1.0), cluster.submit(late, go), cluster.put(2.0)]
    until(cluster, "running", lambda found: len(found) == 1)
    total = cluster.reduce(sources, op="max")
    try:
        (one,) = until(cluster, "collectives", lambda found: len(found) == 1)
        assert {key: one[key] for key in ("kind", "op", "sources", "num", "missing")} == {
            "kind": "reduce", "op": "max", "sources": 3, "num": 3, "missing": 1,
        }  # fmt: skip
        (need,) = one["needs"]
        assert (need["index"], need["id"]) == (1, sources[1].ref.id)  # type: ignore[union-attr]
        assert one["planned"] is None
        (line,) = [line for line in text(cluster).split("\n") if "reduce max" in line]
        assert "2 of 3 sources ready, 3 needed; missing: [1] " in line
        assert "which runs on worker" in line
    finally:
        go.touch()
    assert cluster.get(total) == 2.0
    until(cluster, "collectives", lambda found: not found)


def test_a_long_queue_is_counted(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        first = c.submit(wait_for, go)
        eventually(first.running)
        futures = [c.submit(wait_for, go) for _ in range(WAITS_MAX + 50)]
        dependent = [c.submit(add, first) for _ in range(WAITS_MAX + 20)]
        try:
            found = looked(c)
            assert (found["queued"]["count"], len(found["queued"]["first"])) == (
                WAITS_MAX + 50, WAITS_MAX,
            )  # fmt: skip
            assert (found["waiting"]["count"], len(found["waiting"]["first"])) == (
                WAITS_MAX + 20, WAITS_MAX,
            )  # fmt: skip
            lines = text(c).split("\n")
            assert "  and 50 more (queued)" in lines
            assert "  and 20 more (waiting)" in lines
        finally:
            go.touch()
        c.wait([*futures, *dependent])


def standing_in(cluster: Cluster, words: str) -> dict[str, Any]:
    """The worker whose stack says that; a task that has begun may not have come there yet."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        stacks = looked(cluster, stacks=True)["stacks"]["first"]
        assert len(stacks) >= 2  # others may stand in for those that have just waited
        found[:] = [one for one in stacks if words in one["text"]]
        return bool(found)

    eventually(look)
    (one,) = found
    return one


def test_where_the_threads_stand(cluster: Cluster, tmp_path: Path) -> None:
    """Twice: the file begins anew. The task does not notice."""
    go = tmp_path / "go"
    future = cluster.submit(wait_for, go)
    eventually(future.running)
    try:
        for _ in range(2):
            mine = standing_in(cluster, "in wait_for")
            assert mine["text"].count("Current thread") == 1
            shown = "\n".join(dump.lines(dump.collect(cluster, stacks=True)))
            assert f"worker {mine['worker']} (pid {mine['pid']}) runs" in shown
    finally:
        go.touch()
    assert future.result() == str(go)


def test_a_worker_whose_handler_is_gone_is_left_alone(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def deaf(path: Any) -> str:
        import faulthandler

        from hoplite_mp._protocol.local import STACKS_SIGNAL

        faulthandler.unregister(STACKS_SIGNAL)
        path.with_name("deaf").touch()
        return wait_for(path)

    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        future = c.submit(deaf, go)
        wait_for(tmp_path / "deaf")
        begun = time.monotonic()
        (one,) = looked(c, stacks=True)["stacks"]["first"]
        assert one["text"] == "its stacks cannot be read"
        assert time.monotonic() - begun < 30
        go.touch()
        assert future.result() == str(go)


def test_who_has_not_reported() -> None:
    """Two nodes' words side by side: h0's reduction waits for h1 and h2, of which h1 is done."""
    empty = {"count": 0, "first": []}
    kinds = ("running", "queued", "waiting", "sent", "transfers", "groups", "processes")
    operation = {
        "operation": 9, "kind": "reduce", "op": "sum", "seconds": 2.0, "by": "the driver (pid 1)",
        "sources": 3, "num": 3, "missing": 0, "needs": [], "planned": 1.5, "epoch": 2,
        "waits_for": [1, 2], "waits_for_space": False, "to": [],
    }  # fmt: skip

    def part(reported: bool, epoch: int = 2) -> dict[str, Any]:
        return {
            "operation": 9, "epoch": epoch, "seconds": 1.5, "begun": True, "reported": reported,
            "missing": 0 if reported else 4,
        }  # fmt: skip

    def node(number: int, **sections: list[dict[str, Any]]) -> dict[str, Any]:
        found = dict.fromkeys((*kinds, "collectives", "parts"), empty)
        found |= {kind: {"count": len(one), "first": one} for kind, one in sections.items()}
        return {"node": number, "host": f"host{number}", **found}

    said = {
        0: node(0, collectives=[operation]),
        1: node(1, parts=[part(True)]),
        2: node(2, parts=[part(True, epoch=1), part(False)]),
    }
    packed = {number: msgspec.msgpack.encode(one) for number, one in said.items()}

    class Runtime:
        def __init__(self) -> None:
            self._runtime = self.channel = self

        def call(self, ask: Any) -> Reply:
            if isinstance(ask, Dump):
                return Reply(1, ([(n, len(data)) for n, data in packed.items()], [3]))
            return Reply(1, packed[ask.node][ask.offset : ask.offset + 100])  # in pieces

    found = dump.collect(Runtime())  # type: ignore[arg-type]
    assert found["nodes"][0]["collectives"]["first"][0]["not_reported"] == ["h2"]
    assert list(dump.lines(found)) == [
        "h0 (host0)",
        "  reduce sum (operation 9) by the driver (pid 1) is open for 2.0 s: 3 of 3 sources ready, "
        "3 needed; plan 2 runs for 1.5 s; not reported: h2",
        "h1 (host1)",
        "  part of operation 9, plan 2, open for 1.5 s: reported",
        "h2 (host2)",
        "  part of operation 9, plan 1, open for 1.5 s: reported",
        "  part of operation 9, plan 2, open for 1.5 s: 4 pieces are missing",
        "h3 does not answer",
    ]


def test_workers_without_a_task_are_said_to_be_idle() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        c.submit(abs, -1).result()
        # The result is there a moment before the task has left its worker's stack.
        eventually(lambda: not looked(c)["running"]["first"])
        (one,) = looked(c, stacks=True)["stacks"]["first"]
        assert one["idle"]
        (line,) = [line for line in dump.lines(dump.collect(c, stacks=True)) if "worker" in line]
        assert line.strip() == f"worker {one['worker']} (pid {one['pid']}) is idle"
