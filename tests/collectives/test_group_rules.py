"""Who may be a member, what every rank is told, and when a call gives up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError, StoreFullError
from tests.support.group_members import impatient_and_patient, in_threads
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster, Group

DIFFERENT: dict[str, Callable[[Group], Any]] = {
    "kind": lambda g: g.barrier() if g.rank else g.allreduce(np.ones(2)),
    "op": lambda g: g.allreduce(np.ones(2), op="max" if g.rank == 2 else "sum"),
    "ufunc": lambda g: g.allreduce(np.ones(2), op=np.hypot if g.rank == 1 else np.add),
    "shape": lambda g: g.allreduce(np.ones(2 + (g.rank == 1))),
    "dimensions": lambda g: g.reduce(np.ones((1,) * (1 + (g.rank == 2)))),
    "dtype": lambda g: g.reduce_scatter(np.ones(3, "f4" if g.rank else "f8")),
    "root": lambda g: g.broadcast(np.ones(2), root=g.rank // 2),
    "reduce root": lambda g: g.reduce(np.ones(2), root=g.rank),
    "gather root": lambda g: g.gather(np.ones(2), root=g.rank % 2),
    "no such operation": lambda g: g.allreduce(np.ones(2), op="xor"),
    "no dimension": lambda g: g.reduce_scatter(1.0),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_call_that_differs_is_a_value_error_on_every_rank(cluster: Cluster, what: str) -> None:
    def body(group: Group) -> Any:
        with pytest.raises(ValueError, match=r".") as caught:
            DIFFERENT[what](group)
        again = group.allreduce(np.ones(1))
        return str(caught.value), again.tolist(), group.contributors, group.calls

    found = in_threads(cluster, f"different {what}", 3, body)
    assert {str(one) for one in found} == {str(found[0])}
    assert found[0][1:] == ([3.0], (0, 1, 2), 2)


def test_what_differs_is_named(cluster: Cluster) -> None:
    def body(group: Group) -> str:
        with pytest.raises(ValueError, match="rank") as caught:
            group.allreduce(np.ones(2 + group.rank, f"f{4 * (group.rank + 1)}"))
        return str(caught.value)

    text = in_threads(cluster, "named", 2, body)[0]
    for part in ("rank 0", "rank 1", "(2,)", "(3,)", "float32", "float64"):
        assert part in text


OWN: dict[str, Callable[[Group], Any]] = {
    "op": lambda g: g.allreduce(np.ones(1), op=np.subtract),
    "root": lambda g: g.broadcast(np.ones(1), root=2),
    "parts": lambda g: g.alltoall([1]),
}


@pytest.mark.parametrize("wrong", OWN)
def test_a_mistake_of_one_thread_uses_up_the_call_of_all(cluster: Cluster, wrong: str) -> None:
    def body(group: Group) -> Any:
        call = (lambda g: g.allreduce(np.ones(1))) if group.rank else OWN[wrong]
        with pytest.raises(ValueError, match=f"{wrong}|reduce"):
            call(group)
        return group.allreduce(np.ones(1)).tolist(), group.calls

    assert in_threads(cluster, f"own {wrong}", 2, body) == [([2.0], 2)] * 2


def test_who_is_refused(cluster: Cluster) -> None:
    with cluster.group("taken", 2, 0), cluster.group("taken", 2) as last:
        assert last.rank == 1
        with pytest.raises(ValueError, match="one too many"):
            cluster.group("taken", 2)
        with pytest.raises(ValueError, match=r"rank 1 .* taken"):
            cluster.group("taken", 2, 1)
        with pytest.raises(ValueError, match=r"has size 2.*size 3"):
            cluster.group("taken", 3, 2)
        for rank in (2, -1):
            with pytest.raises(ValueError, match="ranks 0 to 1"):
                cluster.group("taken", 2, rank)
        with pytest.raises(ValueError, match="taken"):
            cluster.submit(lambda: hoplite_mp.current().group("taken", 2, 1)).result(timeout=20)
    for size in (0, -1, 65):
        with pytest.raises(ValueError, match="size"):
            cluster.group("none", size)
    with pytest.raises(ValueError, match="name"):
        cluster.group("", 1)
    for size, rank in ((1.5, 0), (2, "0"), (True, 0), (2, 0.0)):
        with pytest.raises(TypeError, match="integer"):
            cluster.group("none", size, rank)  # type: ignore[arg-type]


def test_without_a_rank_the_lowest_free_one_is_taken(cluster: Cluster) -> None:
    members = [cluster.group("free", 4, 1)] + [cluster.group("free", 4) for _ in range(3)]
    assert [member.rank for member in members] == [1, 0, 2, 3]
    for member in members:
        member.close()
    found = in_threads(cluster, "free", 3, lambda g: g.allreduce(np.array(g.rank)).tolist())
    assert found == [3, 3, 3]


@pytest.mark.parametrize("came", [1, 2])
def test_group_that_does_not_fill_names_who_is_missing_and_is_left(came: int) -> None:
    config = hoplite_mp.Config(group_wait_s=0.1)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        members = [cluster.group("few", 3) for _ in range(came)]
        missing = "ranks 1, 2" if came == 1 else "rank 2"
        words = f"{came} of 3 members joined within group_wait_s=0.1 s; missing: {missing}, which"
        with pytest.raises(HopliteTimeoutError, match=words):
            members[0].barrier()
        with pytest.raises(ClosedError, match="because a call timed out"):
            members[0].barrier()
        for member in members[1:]:
            with pytest.raises(HopliteTimeoutError, match="missing: ranks 0, 2, which"):
                member.barrier()
        found = in_threads(cluster, "few", 3, lambda g: (g.allgather(g.rank), g.calls))
        assert found == [([0, 1, 2], 1)] * 3


def test_call_that_times_out_names_who_is_missing_and_ends_membership(cluster: Cluster) -> None:
    first, second = impatient_and_patient(cluster, "slow")
    words = (
        r"call 1 is still waiting for ranks \[1\], after 0.1 s. This rank has left the Group. "
        "To continue, "
    )
    with pytest.raises(HopliteTimeoutError, match=words + "join it again with the same name"):
        first.allreduce(np.ones(1))
    for call in (first.barrier, first.barrier_async, lambda: first.split(0)):
        with pytest.raises(ClosedError, match="this member has left, because a call timed out"):
            call()
    assert second.allreduce(np.ones(1)).tolist() in ([1.0], [2.0])  # without its part, or with it
    with cluster.group("slow", 2, 0, timeout=60) as again:
        waits = again.allreduce_async(np.ones(1))
        eventually(lambda: second.allreduce(np.ones(1)).tolist() == [2.0], "it takes part")
        assert waits.result(20).tolist() == [2.0]
        assert again.calls == second.calls
    second.close()


def test_what_a_member_can_see(cluster: Cluster) -> None:
    group = cluster.group("look", 2, 1)
    assert (group.rank, group.size, group.alive) == (1, 2, (1,))
    assert (group.contributors, group.calls) == ((), None)
    other = cluster.group("look", 2, 0, timeout=20)
    eventually(lambda: group.alive == (0, 1), "the other one")
    thread = threading.Thread(target=lambda: [other.barrier() for _ in range(3)])
    thread.start()
    for _ in range(3):
        group.barrier()
    thread.join(20)
    assert (group.contributors, group.calls, other.calls) == ((0, 1), 3, 3)
    with pytest.raises(AttributeError):
        group.nothing_async()
    other.close()
    eventually(lambda: group.alive == (1,), "that the other one has left")
    assert group.allreduce(np.ones(2)).tolist() == [1.0, 1.0]
    assert group.contributors == (1,)
    with pytest.raises(PeerLostError, match="rank 0"):
        group.broadcast(None, root=0)
    group.close()
    group.close()
    with pytest.raises(ClosedError):
        group.barrier()


def test_a_strict_member_does_not_go_on_without_the_others(cluster: Cluster) -> None:
    strict = cluster.group("strict", 2, 0, strict=True, timeout=20)
    other = cluster.group("strict", 2, 1)
    other.close()
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"ranks \[1\]"):
            strict.allreduce(np.ones(1))
    strict.close()


def test_what_goes_wrong_in_the_leader_is_told_to_everybody() -> None:
    """Here it has no room for the result; nobody may be left waiting."""

    def body(group: Group) -> Any:
        with pytest.raises(StoreFullError, match="16 MiB"):
            group.allreduce(np.ones(3 << 18))  # 6 MiB
        return group.allreduce(np.ones(1)).tolist(), group.calls

    config = hoplite_mp.Config(put_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as cluster:
        assert in_threads(cluster, "full", 2, body) == [([2.0], 2)] * 2


def test_a_name_is_free_when_all_have_left(cluster: Cluster) -> None:
    """By closing, and by the end of their tasks."""

    def member(rank: int, size: int) -> Any:
        return hoplite_mp.current().group("again", size, rank).allreduce(np.ones(1)).tolist()

    for size in (2, 3, 1, 2):
        tasks = [cluster.submit(member, rank, size) for rank in range(size)]
        assert [task.result(timeout=20) for task in tasks] == [[float(size)]] * size
        found = in_threads(cluster, "again", size, lambda g: g.allreduce(np.ones(1)).tolist())
        assert found == [[float(size)]] * size


def test_a_member_leaves_when_its_task_fails(cluster: Cluster) -> None:
    def member(rank: int) -> Any:
        group = hoplite_mp.current().group("raises", 2, rank)
        group.barrier()
        if rank:
            raise KeyError("left")
        while True:
            group.allreduce(np.ones(1))
            if group.contributors == (0,):
                return group.alive

    tasks = [cluster.submit(member, rank) for rank in range(2)]
    assert tasks[0].result(timeout=20) == (0,)
    with pytest.raises(KeyError, match="left"):
        tasks[1].result(timeout=20)


def test_groups_leave_nothing_in_the_store(cluster: Cluster) -> None:
    def body(group: Group) -> None:
        for _ in range(3):
            group.allreduce(np.ones(100_000))
            group.allgather(np.ones(1000))

    in_threads(cluster, "warm", 2, body)
    (before,) = eventually(lambda: _settled(cluster))
    for number in range(5):
        in_threads(cluster, f"leak {number}", 2, body)
    eventually(lambda: cluster.stats()["objects"] <= before, "that all is given back")


def _settled(cluster: Cluster) -> tuple[int, ...]:
    """The number of objects, which may be 0, if it stays the same."""
    first = cluster.stats()["objects"]
    return (first,) if first == cluster.stats()["objects"] else ()


def test_why_an_operation_does_not_fit_is_told_whole_by_processes_that_have_stored_nothing(
    cluster: Cluster,
) -> None:
    """The text is longer than what lies beside a header, and they have no room of their own yet."""

    def peer(rank: int, size: int) -> list[str]:
        group = hoplite_mp.current().group("does not fit", size, rank)
        seen = []
        for x, op in ((np.ones(4), "xor"), (np.ones(4) * 1j, "or")):
            with pytest.raises(ValueError, match="not supported") as caught:
                group.allreduce(x, op)
            seen.append(str(caught.value))
        return seen

    for future in cluster.spmd(peer, 2, 2):
        for text, ufunc in zip(future.result(30), ("bitwise_xor", "bitwise_or"), strict=True):
            assert text.startswith(f"ufunc '{ufunc}' not supported for the input types")
            assert text.endswith("casting rule ''safe''")


@pytest.mark.parametrize("length", [4, 300_000])
def test_an_out_that_may_not_be_written_is_refused(cluster: Cluster, length: int) -> None:
    with cluster.group("read-only", 1) as group:
        out = np.zeros(length)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            group.allreduce(np.ones(length), out=out)
        assert group.allreduce(1.0) == 1.0


def test_without_any_room_such_a_text_is_cut(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise StoreFullError("the reserve for errors is in use")

    with cluster.group("full", 1) as group:
        group.barrier()
        monkeypatch.setattr(cluster._runtime.memory, "allocate_error", full)
        with pytest.raises(ValueError, match="ufunc 'bitwise_xor' not supp"):
            group.allreduce(np.ones(4), "xor")
        assert group.allreduce(1.0) == 1.0


@pytest.mark.parametrize("mistake", ["op", "parts", "root", "pickle"])
def test_a_mistake_of_one_rank_is_everybodys(cluster: Cluster, mistake: str) -> None:
    def peer(rank: int, size: int, mistake: str) -> list[str]:
        group = hoplite_mp.current().group(f"mistake {mistake}", size, rank)
        wrong = rank == 1
        seen = []
        for _ in range(2):
            try:
                if mistake == "op":
                    group.allreduce(1.0, "plus" if wrong else "sum")
                elif mistake == "parts":
                    group.alltoall([1.0] * (size - wrong))
                elif mistake == "root":
                    group.broadcast(root=1)
                else:
                    group.allgather((lambda: (yield))() if wrong else 1.0)
            except (ValueError, TypeError) as error:
                seen.append(type(error).__name__)
        seen.append(str(float(group.allreduce(1.0))))
        return seen

    futures = cluster.spmd(peer, 3, 3, mistake)
    for future in futures:
        first, second, total = future.result(30)
        assert total == "3.0"
        assert first == second == ("TypeError" if mistake == "pickle" else "ValueError")


def test_call_that_times_out_on_one_rank_ends_among_the_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    late, over = Gate(tmp_path, "late"), Gate(tmp_path, "over")

    def run(rank: int) -> str:
        group = hoplite_mp.current().group("timed out", 3, rank)
        group.barrier()
        group._member.timeout = 0.3 if rank == 1 else None
        if rank == 2:
            late.wait()
        try:
            total = float(group.allreduce(1.0))
        except TimeoutError:
            late.open()
            with pytest.raises(ClosedError, match="because a call timed out"):
                group.allreduce(1.0)
            over.wait()  # goes on living, and does not join again
            return "late"
        if rank == 0:
            over.open()
        return str(total)

    first, late_one, last = [future.result(30) for future in cluster.spmd(run, 3)]
    assert late_one == "late"
    assert first == last, "the part of the late rank counts for all or for none"
    assert first in ("2.0", "3.0")


@pytest.mark.parametrize(
    "options",
    [
        {"retries": 0}, {"timeout": 5.0}, {"priority": 1}, {"restarts": 1}, {"detached": True},
        {"concurrency": 2}, {"buffersize": 3}, {"node": "h0"}, {"name": "x"}, {"env": {"A": "b"}},
        {"retry_exceptions": KeyError},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_option_without_effect_on_a_group_is_refused(
    cluster: Cluster, options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"\b{name}=.*group\(\)"):
        cluster.options(**options).group("options", 1)
    with cluster.options(copy=True).group("options", 1) as group:
        assert group.allreduce(1.0) == 1.0


def test_strict_that_is_no_bool_is_refused(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="strict='no': it must be True or False"):
        cluster.group("strict", 1, strict="no")  # type: ignore[arg-type]
