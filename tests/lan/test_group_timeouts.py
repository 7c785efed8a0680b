"""Calls of a Group over emulated hosts that time out on some ranks, and that these make again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.lan.test_cluster import TLS_OR_PLAIN, UpCluster
from tests.lan.test_groups import SIZE, members

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(SIZE) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    made = UpCluster(lan, tls=request.param, workers=0)
    yield made
    assert made.end() == [0, 0, 0]


# Rank 1 makes each fifth call only after the others have told it that theirs has timed out. They
# give what is small, what is prepared ahead because it comes again and again, and what is large.
TIMED = """
    import random
    timed = c.group("timed", size, rank, timeout=None if rank == 1 else 0.05)
    order, late = random.Random(7), 0
    for call in range(60):
        kind = order.choice(["allreduce", "allreduce", "allgather", "broadcast", "barrier"])
        items = order.choice([0, 1, 3000, 130_000, 130_000, 130_000, 400_000])
        parts = [np.arange(items) + 7 * r + call for r in range(size)]
        given = {"barrier": (), "broadcast": (parts[0] if rank == 0 else None,)}
        if rank == 1 and call % 5 == 0:
            assert [g.recv(other) for other in (0, 2)] == [call, call]
        tries = 0
        while True:
            try:
                got = getattr(timed, kind)(*given.get(kind, (parts[rank],)))
                break
            except hoplite_mp.HopliteTimeoutError:
                late += 1
                tries += 1
                if tries == 1 and call % 5 == 0:
                    g.send(call, 1)
        wanted = {"allreduce": sum(parts), "broadcast": parts[0], "allgather": parts}.get(kind)
        assert kind == "barrier" or np.array_equal(got, wanted), (call, kind, items)
        assert timed.calls == call + 1
    g.barrier()
    timed.close()
    say(late >= 12 if rank != 1 else late)
"""


def test_they_get_what_the_others_get(cluster: UpCluster, lan: Lan) -> None:
    found = members(cluster, lan, "beside", TIMED)
    assert found == [["True"], ["0"], ["True"]]
