"""A leader of a Group's call that is interrupted right after its decision: the others read it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import ClosedError, PeerLostError
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from hoplite_mp import Cluster, Group


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


def interrupted_leader(
    cluster: Cluster, name: str, kind: str, x: Any, strict: bool = False
) -> tuple[Group, Any, threading.Event]:
    """The other member of a Group whose leader was interrupted after its commit; the Future of
    its call, which looks for the commit once the event is set; that event."""
    over = threading.Event()
    leader, other = (cluster.group(name, 2, r, strict=strict, timeout=20) for r in range(2))
    other._calls._board = Late(other._calls._board, over)  # type: ignore[assignment]
    waits = getattr(other, f"{kind}_async")(2 * x)
    leader._calls._board = Interrupting(leader._calls._board)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        getattr(leader, kind)(x)
    with pytest.raises(ClosedError, match="because a call ended by KeyboardInterrupt"):
        leader.barrier()
    return other, waits, over


def right(kind: str, x: Any) -> Any:
    return 3 * x if kind == "allreduce" else [x, 2 * x]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("nbytes", [1 << 17, 1 << 20])
@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
def test_leader_interrupted_after_its_commit_has_left_and_its_result_stays(
    cluster: Cluster, kind: str, nbytes: int, strict: bool
) -> None:
    x = np.ones(nbytes // 8)
    name = f"interrupted {kind} {nbytes} {strict}"
    other, waits, over = interrupted_leader(cluster, name, kind, x, strict)
    over.set()
    assert np.array_equal(waits.result(20), right(kind, x))
    assert other.contributors == (0, 1)
    if strict:
        with pytest.raises(PeerLostError, match=r"ranks \[0\] are lost"):
            other.allgather(1)
    else:
        assert other.allgather(1) == [None, 1]
    other.close()


@pytest.mark.parametrize("nbytes", [1 << 17, 1 << 20])
@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
def test_leader_interrupted_after_its_commit_joins_again_before_the_others_have_read_it(
    cluster: Cluster, kind: str, nbytes: int
) -> None:
    x, name = np.ones(nbytes // 8), f"interrupted and joins again {kind} {nbytes}"
    other, waits, over = interrupted_leader(cluster, name, kind, x)
    with cluster.group(name, 2, 0, timeout=20) as again:
        later = again.allgather_async("again")
        over.set()
        assert np.array_equal(waits.result(20), right(kind, x))
        eventually(lambda: other.allgather("other") == ["again", "other"], "it takes part")
        assert later.result(20) == ["again", "other"]
    other.close()
