"""A leader of a Group's call that is interrupted right after its decision: the others read it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from hoplite_mp import Cluster


pytestmark = pytest.mark.usefixtures("no_call_buffers")


class Interrupting:
    """A board whose commit ends as a forced cancel may let it end."""

    def __init__(self, board: Any) -> None:
        self.board = board

    def __getattr__(self, name: str) -> Any:
        return getattr(self.board, name)

    def commit(self, call: int, result: int) -> None:
        self.board.commit(call, result)
        raise KeyboardInterrupt


class Late:
    """A board whose member does not look between the commit and that the leader's call is over."""

    def __init__(self, board: Any, over: threading.Event) -> None:
        self.board, self.over = board, over

    def __getattr__(self, name: str) -> Any:
        return getattr(self.board, name)

    def look(self) -> Any:
        found = self.board.look()
        if found[4]:  # there is a commit
            assert self.over.wait(20)
        return found


@pytest.mark.parametrize("closes", [False, True])
def test_what_it_has_committed_stays(cluster: Cluster, closes: bool) -> None:
    over = threading.Event()
    with (
        cluster.group(f"interrupted {closes}", 2, 0, timeout=20) as leader,
        cluster.group(f"interrupted {closes}", 2, 1, timeout=20) as other,
    ):
        other._board = Late(other._board, over)
        waits = other.allgather_async("b")
        leader._board = Interrupting(leader._board)
        with pytest.raises(KeyboardInterrupt):
            leader.allgather("a")
        if closes:
            leader.close()
        over.set()
        assert waits.result(20) == ["a", "b"]


@pytest.mark.parametrize("nbytes", [1 << 17, 1 << 20])
@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
def test_a_leader_that_makes_the_call_again(cluster: Cluster, kind: str, nbytes: int) -> None:
    """It finds its own commit, whose result the other member still has to read."""
    over = threading.Event()
    name = f"interrupted and made again {kind} {nbytes}"
    x = np.ones(nbytes // 8)
    with (
        cluster.group(name, 2, 0, timeout=20) as leader,
        cluster.group(name, 2, 1, timeout=20) as other,
    ):
        other._board = Late(other._board, over)
        waits = getattr(other, f"{kind}_async")(2 * x)
        board = leader._board
        leader._board = Interrupting(board)
        with pytest.raises(KeyboardInterrupt):
            getattr(leader, kind)(x)
        assert leader.calls == 0
        leader._board = board
        mine = getattr(leader, kind)(x)
        assert leader.calls == 1
        over.set()
        for got in (mine, waits.result(20)):
            right = 3 * x if kind == "allreduce" else [x, 2 * x]
            assert np.array_equal(got, right)
