"""The cache of stripe plans for repeated operations."""

from __future__ import annotations

from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._planner.plan_cache import STRIPE_PLANS_MAX, PlanCache

NBYTES = 1 << 26


def test_equal_requests_get_the_cached_plan() -> None:
    cache = PlanCache(LinkSpeeds())
    sent = dict.fromkeys(range(4), 1)

    def reduction(**more: int) -> object:
        return cache.reduction(
            "allreduce", more.get("nbytes", NBYTES), sent, range(4), ordered=False, leaving=()
        )

    first = reduction()
    assert reduction() is first
    assert reduction(nbytes=NBYTES + 1) is not first
    assert reduction() is first
    spread = cache.spread(NBYTES, 0, (1, 2, 3), ())
    assert cache.spread(NBYTES, 0, (1, 2, 3), set()) is spread
    assert cache.spread(NBYTES, 0, (1, 3, 2), ()) is not spread
    assert cache.spread(NBYTES, 0, (1, 2, 3), {3}) is not spread


def test_changed_links_invalidate_cached_plans() -> None:
    speeds = LinkSpeeds()
    for node in range(4):
        speeds.measure_host(node, 1e8, 1e8)
    cache = PlanCache(speeds)
    before = cache.spread(NBYTES, 0, (1, 2, 3), ())
    for _ in range(20):
        speeds.measure_host(1, 1e7, 1e7)
    slow = cache.spread(NBYTES, 0, (1, 2, 3), ())
    assert slow.stripes != before.stripes
    speeds.measure_link(0, 1, 1e-2, None, 0.0)
    later = cache.spread(NBYTES, 0, (1, 2, 3), ())
    assert later.seconds > slow.seconds
    speeds.lose(1)
    assert cache.spread(NBYTES, 0, (1, 2, 3), ()) is not later


def test_oldest_cached_plans_are_evicted() -> None:
    cache = PlanCache(LinkSpeeds())
    first = cache.spread(NBYTES, 0, (1, 2), ())
    second = cache.spread(NBYTES, 0, (1, 3), ())
    for nbytes in range(STRIPE_PLANS_MAX - 2):
        cache.spread(nbytes, 0, (1, 2), ())
    assert cache.spread(NBYTES, 0, (1, 2), ()) is first  # now the most recent
    cache.spread(NBYTES, 1, (2, 3), ())
    assert cache.spread(NBYTES, 0, (1, 2), ()) is first
    assert cache.spread(NBYTES, 0, (1, 3), ()) is not second
