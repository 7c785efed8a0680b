"""Shares of a fold in general, against a search over all shares of a grid."""

from __future__ import annotations

import itertools
import random

import pytest

from hoplite_mp._planner import cost
from hoplite_mp._planner.link_speeds import HostRates

STEPS = 12
CASES = 1500


def grid(count: int, steps: int) -> list[tuple[int, ...]]:
    """All ways to divide so many steps."""
    if count == 1:
        return [(steps,)]
    return [(first, *rest) for first in range(steps + 1) for rest in grid(count - 1, steps - first)]


GRIDS = {
    count: [tuple(step / STEPS for step in row) for row in grid(count, STEPS)] for count in (2, 3)
}


def test_fold_shares_match_exhaustive_search() -> None:
    """Also for hosts that send less the more they own, because several members lie there."""
    rng = random.Random(3)
    for _ in range(CASES):
        count = rng.choice((2, 3))
        hosts = [HostRates(rng.choice((1e8, 3e7)), rng.choice((1e8, 3e7))) for _ in range(count)]
        sent = [rng.randint(0, 3) for _ in hosts]
        wanted = [rng.random() < 0.5 for _ in hosts]
        may_own = [rng.random() < 0.8 for _ in hosts]
        if not (any(sent) and any(wanted) and any(may_own)):
            continue
        seconds, shares = cost.folding(1, hosts, sent, wanted, may_own)
        assert sum(shares) == pytest.approx(1)
        assert all(0 <= share <= may for share, may in zip(shares, may_own, strict=True))
        for row in GRIDS[count]:
            if all(may or not share for may, share in zip(may_own, row, strict=True)):
                found = cost.folding_s(1, hosts, sent, wanted, row)
                assert seconds <= 1.0001 * found, (hosts, sent, wanted, may_own, row)


def test_fold_holder_of_three_members_owns_the_stripe() -> None:
    """Hosts alike; three members lie on the first, one on the second, which has the result. If the
    second one owned half, it would receive 1.5 objects; so the first one owns all of it, and sends
    the result alone."""
    hosts = [HostRates(1e8, 1e8)] * 2
    seconds, shares = cost.folding(10**8, hosts, [3, 1], [False, True], [True] * 2)
    assert shares == pytest.approx([1.0, 0.0], abs=1e-5)
    assert seconds == pytest.approx(1.0, rel=1e-5)


def test_fold_shares_exist_for_every_assignment() -> None:
    """Whoever may own, whoever gives, whoever wants it: the search ends."""
    rates = (1e6, 1e8, 1e10)
    for sent, own in itertools.product(itertools.product((0, 1, 5), repeat=2), (0, 1, 2)):
        if not any(sent):
            continue
        for up, down in itertools.product(rates, repeat=2):
            hosts = [HostRates(up, down), HostRates(down, up)]
            may_own = [own != 1, own != 2]
            _, shares = cost.folding(1 << 30, hosts, sent, [True, False], may_own)
            assert sum(shares) == pytest.approx(1)
