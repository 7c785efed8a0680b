"""A member that is killed comes back: into its Group, or to learn that it has ended."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import PeerLostError
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "rejoining.md"
STEPS = 200
AT_ONCE_S = 25.0  # config's group_wait_s is 30


def recipe(gradient: Callable[..., Any] | None = None) -> Any:
    """The page's `train`, with a test's gradient instead of the page's."""
    (code,) = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, str(RECIPE), "exec"), names)
    if gradient is not None:
        names["gradient"] = gradient
    return names["train"]


def slow_gradient(folder: Path, victims: tuple[int, ...]) -> Callable[..., Any]:
    """Says who is where, so that it can be killed there; who is killed has the second half of the
    steps to come back in, however long that takes."""

    def gradient(weights: Any, rank: int, step: int) -> Any:
        (folder / f"{rank}.{os.getpid()}").touch()
        (folder / f"step-{rank}").write_text(str(step))
        waits = step > STEPS // 2 and any(len(pids(folder, one)) < 2 for one in victims)
        time.sleep(0.2 if waits else 0.003)
        return weights - rank

    return gradient


def pids(folder: Path, rank: int) -> set[int]:
    return {int(path.name.split(".")[1]) for path in folder.glob(f"{rank}.*")}


def at(folder: Path, rank: int, step: int) -> bool:
    path = folder / f"step-{rank}"
    return path.exists() and int(path.read_text() or 0) >= step


@pytest.mark.parametrize(
    "victims",
    [pytest.param(one, marks=pytest.mark.soak) for one in ((1,), (0,))] + [(0, 2)],
    ids=str,
)
def test_the_recipe_of_the_page(cluster: Cluster, tmp_path: Path, victims: tuple[int, ...]) -> None:
    """Killed members come back with the survivors' weights: in the end all have the same."""
    train = recipe(slow_gradient(tmp_path, victims))
    futures = cluster.spmd(train, 3, 3, STEPS)
    eventually(lambda: all(at(tmp_path, rank, 5) for rank in range(3)), "the fifth step")
    for rank in victims:
        (pid,) = pids(tmp_path, rank)
        os.kill(pid, signal.SIGKILL)
    found = [future.result(60) for future in futures]
    for rank in victims:
        assert len(pids(tmp_path, rank)) == 2, "it came back, and took part"
    assert len({weights.tobytes() for weights in found}) == 1
    assert 0 < found[0][0] < 2


def test_the_recipe_as_it_stands(cluster: Cluster) -> None:
    found = [future.result(60) for future in cluster.spmd(recipe(), 3, 3, 100)]
    assert np.allclose(found, 1.0, atol=1e-3)  # the mean of the ranks
    assert len({weights.tobytes() for weights in found}) == 1


def late_member(rank: int, name: str, size: int, folder: Path, others: Gate) -> Any:
    """Rank 1 is killed, and comes back when the gate is open."""
    again = rank == 1 and (folder / "pid").exists()
    if again:
        others.wait()
    begun = time.monotonic()
    try:
        g = hoplite_mp.current().group(name, size, rank)
        g.barrier()
    except PeerLostError as error:
        return str(error), time.monotonic() - begun
    if rank == 1 and not again:
        (folder / "pid.new").write_text(str(os.getpid()))
        (folder / "pid.new").rename(folder / "pid")
        while True:
            time.sleep(1)
    while 1 in g.alive and not again:
        time.sleep(0.001)
    return g.allgather(rank)


def kill_when_there(folder: Path) -> None:
    path = folder / "pid"
    os.kill(int(eventually(lambda: path.exists() and path.read_text())), signal.SIGKILL)


def test_who_comes_back_when_the_others_have_left_learns_so_at_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    others = Gate(tmp_path)
    futures = cluster.spmd(late_member, 4, "late", 4, tmp_path, others)
    kill_when_there(tmp_path)
    for rank in (0, 2, 3):
        assert futures[rank].result(30) == [0, None, 2, 3]
    others.open()
    text, seconds = futures[1].result(AT_ONCE_S)
    assert "group 'late' has ended" in text
    assert seconds < AT_ONCE_S


def test_the_name_is_free_for_others_and_not_for_who_comes_late(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A driver uses the name again, also while the late one asks for a rank of it."""
    others = Gate(tmp_path)
    futures = cluster.spmd(late_member, 2, "used again", 2, tmp_path, others)
    kill_when_there(tmp_path)
    assert futures[0].result(30) == [0, None]
    with cluster.group("used again", 2, 0, timeout=20) as first:
        others.open()
        assert "has ended" in futures[1].result(AT_ONCE_S)[0]
        with cluster.group("used again", 2, 1, timeout=20) as second:
            waits = first.allgather_async("a")
            assert second.allgather("b") == waits.result(20) == ["a", "b"]

    def member(rank: int) -> Any:
        with hoplite_mp.current().group("used again", 2, rank) as group:
            return group.allgather(rank)

    for _ in range(2):  # and others may use the name again and again
        assert [f.result(30) for f in cluster.spmd(member, 2)] == [[0, 1]] * 2


def test_members_that_have_all_died_form_their_group_anew(cluster: Cluster, tmp_path: Path) -> None:
    def member(rank: int, folder: Path) -> Any:
        first = not (folder / "again").exists()
        while not first and not (folder / "go").exists():
            time.sleep(0.01)  # one that came while another one lived would go on without it
        with hoplite_mp.current().group("all", 3, rank) as group:
            group.barrier()
            (folder / f"{rank}.{os.getpid()}").touch()
            while first:
                time.sleep(1)
            return group.allgather(rank)

    futures = cluster.spmd(member, 3, tmp_path)
    eventually(lambda: all(len(pids(tmp_path, rank)) == 1 for rank in range(3)), "all")
    (tmp_path / "again").touch()
    lost = cluster.stats()["workers_lost"]
    for rank in range(3):
        os.kill(*pids(tmp_path, rank), signal.SIGKILL)
    eventually(lambda: cluster.stats()["workers_lost"] == lost + 3, "they have not died")
    (tmp_path / "go").touch()
    assert [future.result(30) for future in futures] == [[0, 1, 2]] * 3


def leaves_then_dies(
    rank: int, name: str, folder: Path, victims: tuple[int, ...], gates: dict[int, Gate]
) -> Any:
    """Four members leave their Group; then the victims' processes end, and the others return when
    their gate is open. What a victim finds when it is tried again is its result."""
    again = (folder / f"was-{rank}").exists()
    begun = time.monotonic()
    if again and ("back", rank) in gates:
        gates["back", rank].wait()  # type: ignore[index]
        begun = time.monotonic()
    try:
        with hoplite_mp.current().group(name, 4, rank) as g:
            (folder / f"asked-{rank}-{again}").touch()
            found = g.allgather(rank)
    except PeerLostError as error:
        return str(error), time.monotonic() - begun
    if rank in victims and not again:
        (folder / f"was-{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in gates:
        gates[rank].wait()
    return found


def told_at_once(future: Any) -> None:
    text, seconds = future.result(AT_ONCE_S)
    assert "has ended: this task was a member before its retry" in text
    assert seconds < AT_ONCE_S


@pytest.mark.parametrize("victims", [(1,), (0, 3)], ids=str)
def test_who_dies_after_it_has_left_and_finds_the_others_over(
    cluster: Cluster, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    back: Any = {("back", rank): Gate(tmp_path / "gates") for rank in victims}
    (tmp_path / "gates").mkdir()
    futures = cluster.spmd(leaves_then_dies, 4, "left", tmp_path, victims, back)
    for rank in {0, 1, 2, 3} - set(victims):
        assert futures[rank].result(30) == [0, 1, 2, 3]
    for gate in back.values():
        gate.open()
    for rank in victims:
        told_at_once(futures[rank])


def test_it_waits_as_long_as_another_one_could_come(cluster: Cluster, tmp_path: Path) -> None:
    """And takes nobody's place: when the last of the others is over it is told."""
    gate = Gate(tmp_path)
    futures = cluster.spmd(leaves_then_dies, 4, "could come", tmp_path, (1,), {2: gate})
    eventually(lambda: (tmp_path / "asked-1-True").exists(), "the task, tried again")
    for rank in (0, 3):
        assert futures[rank].result(30) == [0, 1, 2, 3]
    with pytest.raises(TimeoutError):
        futures[1].result(0.2)
    gate.open()
    assert futures[2].result(30) == [0, 1, 2, 3]
    text, _ = futures[1].result(AT_ONCE_S)
    assert "has ended" in text
    with cluster.group("could come", 1, 0, timeout=20) as g:
        g.barrier()  # the name is free, for a Group of any size


def test_all_of_them_are_tried_again_and_form_it_anew(cluster: Cluster, tmp_path: Path) -> None:
    futures = cluster.spmd(leaves_then_dies, 4, "all again", tmp_path, (0, 1, 2, 3), {})
    assert [future.result(30) for future in futures] == [[0, 1, 2, 3]] * 4
    assert len(list(tmp_path.glob("asked-*-True"))) == 4


def uses_it_twice(rank: int, folder: Path, gate: Gate) -> Any:
    """The second member dies between the two uses, and comes first to the second one."""
    again = (folder / "was").exists()
    found = []
    for turn in range(2 - again if rank == 1 else 2):
        if turn and rank != 1:
            gate.wait()
        with hoplite_mp.current().group("twice", 3, rank) as g:
            if rank == 1 and again:
                (folder / "waits").touch()
            found.append(g.allgather((rank, again and rank == 1)))
        if rank == 1 and not again:
            (folder / "was").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return found[-1]


def test_others_that_use_the_name_again_find_it(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    futures = cluster.spmd(uses_it_twice, 3, tmp_path, gate)
    eventually(lambda: (tmp_path / "waits").exists(), "the task, tried again")
    gate.open()
    second = [(0, False), (1, True), (2, False)]
    assert [future.result(30) for future in futures] == [second] * 3


def pair_in_turn(rank: int, gates: list[Gate]) -> Any:
    """Peer 0 gives the pair up; then peers 1 and 2 use its name, as ranks 1 and 0."""
    if rank:
        gates[rank - 1].wait()
    with hoplite_mp.current().group("pair in turn", 2, rank % 2, timeout=20) as g:
        return g.allgather(rank) if rank else None


def test_name_of_a_smaller_group_is_used_again_by_other_peers_of_the_call(
    cluster: Cluster, tmp_path: Path
) -> None:
    gates = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        gates.append(Gate(tmp_path / name))
    futures = cluster.spmd(pair_in_turn, 3, gates)
    assert futures[0].result(30) is None
    gates[0].open()
    with pytest.raises(TimeoutError):
        futures[1].result(0.2)  # it waits for peer 2
    gates[1].open()
    assert [one.result(30) for one in futures[1:]] == [[2, 1]] * 2
