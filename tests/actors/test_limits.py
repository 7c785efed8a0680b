"""As many actors as a node can have, and one more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 256  # of a node: the node itself, programs and workers
WORDS = r"node h0 has reached its limit of 256 processes .*; 253 are actors"


class Small:
    def value(self) -> int:
        return 7


@pytest.mark.soak  # 253 processes take minutes of a processor
@pytest.mark.timeout(600)
def test_one_actor_too_many_is_an_error_that_names_the_limit_and_what_to_do() -> None:
    with hoplite_mp.Cluster(1, memory="2GiB") as cluster:
        actors = [cluster.actor(Small) for _ in range(SLOTS - 3)]
        calls: list[Callable[[], Any]] = [
            lambda: cluster.actor(Small),
            lambda: cluster.options(name="named").actor(Small),
            lambda: cluster.executor(1),
            lambda: cluster.spmd(add, 1),
            lambda: cluster.add_workers(1),
            hoplite_mp.Queue,
        ]
        for call in calls:
            with pytest.raises(ValueError, match=WORDS) as caught:
                call()
            assert "keep several objects in one actor" in str(caught.value)
        assert actors[-1].value().result(4 * PATIENCE_S) == 7
        assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3
        assert cluster.nodes[0].workers == 1
        actors.pop()

        def another() -> bool:
            try:
                actors.append(cluster.actor(Small))
            except ValueError:
                return False
            return True

        eventually(another)
        assert actors[-1].value().result(4 * PATIENCE_S) == 7
