"""Stripe plans: the trees over which the stripes of an object are sent or folded.

Three shapes are compared by `cost`:

- "stripes": every stripe has an owner, one hop from all other nodes. All links are used at the same
  time, so this shape is the fastest for large objects. But the busiest node opens a stream to every
  other node.
- "tree:d": one stripe, over a tree of degree d that is filled level by level. In a fold the first
  nodes to arrive are the leaves (Hoplite). Each node has few streams, which suits small objects and
  many nodes.
- one owner: "stripes" with a single stripe, for objects that are too small to be cut.

A stripe below STRIPE_BYTES_MIN is not worth its streams, so small objects have few owners. These
are the nodes with the largest shares, and among equals the first to arrive. If all contributions
are on the only destination, that node owns the only stripe.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from hoplite_mp._planner import cost
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._planner.plan_log import estimate
from hoplite_mp._protocol.fields import SHARES
from hoplite_mp._protocol.messages import Stripe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hoplite_mp._planner.link_speeds import LinkSpeeds
    from hoplite_mp._planner.plan_log import Estimate, NodeRate

# The requests for a smaller stripe would take longer than its parallel path saves. Higher: fewer
# owners.
STRIPE_BYTES_MIN = 64 << 10
# Degrees of the trees that are considered. Hoplite considers 1, 2 and n, which is "one owner" here.
DEGREES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class StripePlan:
    """One way to run an operation. `seconds`: the duration according to the cost model. `why`: the
    reason for the choice, for users."""

    shape: str
    stripes: tuple[Stripe, ...]
    seconds: float
    why: str
    estimates: tuple[Estimate, ...] = ()  # the estimates for all shapes
    rates: tuple[NodeRate, ...] = ()  # the nodes' rates that were known when the plan was made


def single_vertex(node: int) -> tuple[Stripe, ...]:
    """The stripes of a plan in which one node owns the whole object."""
    return (Stripe(node, 0, SHARES),)


def owners(stripes: Iterable[Stripe]) -> set[int]:
    """All nodes that must report their stripes complete before the result is valid."""
    return {stripe.owner for stripe in stripes}


def cut(shares: Iterable[tuple[int, float]]) -> tuple[Stripe, ...]:
    """Cuts an object into stripes for these (owner, weight) pairs, in this order. The weights need
    not add up to 1."""
    rows = [row for row in shares if row[1] > 0]
    weights = [weight for _, weight in rows]
    scale = SHARES / sum(weights)
    stripes: list[Stripe] = []
    begin = 0
    reached = accumulate([weight * scale for weight in weights])
    for (owner, _), end in zip(rows, map(round, reached), strict=True):
        if end > begin:
            stripes.append(Stripe(owner, begin, min(SHARES, end)))
            begin = end
    return tuple(stripes)


def halves(count: int) -> list[tuple[int, int]]:
    """`count` consecutive ranges of shares, nearly equal and not empty."""
    edges = [SHARES * index // count for index in range(count + 1)]
    return list(pairwise(edges))


def spread(
    nbytes: int,
    source: int,
    receivers: Sequence[int],
    speeds: LinkSpeeds,
    leaving: Collection[int] = (),
) -> StripePlan:
    """The stripe plan for copies from one source to a fixed set of receivers."""
    up = speeds.hosts((source,))[0].up
    hosts = speeds.hosts(receivers)
    latency_s = speeds.latency_s((source, *receivers))
    _, direct, shares = cost.broadcast(nbytes, up, hosts)
    if leaving and any(receiver in leaving for receiver in receivers):
        shares = [
            0.0 if receiver in leaving else share
            for receiver, share in zip(receivers, shares, strict=True)
        ]
        if not any(shares):
            direct = 1.0
    direct, shares = _few(nbytes, direct, shares)
    total = direct + sum(shares)
    direct, shares = direct / total, [share / total for share in shares]
    transfer_s = cost.broadcast_s(nbytes, up, hosts, direct, shares)
    streams = _positive(shares) + len(receivers)
    stripes = cut([*zip(receivers, shares, strict=True), (source, direct)])
    choices = [("stripes", stripes, cost.one_hop_s(transfer_s, streams, latency_s))]
    if nbytes <= STRIPE_BYTES_MIN:
        alone = len(receivers) * (nbytes / up + cost.STREAM_S) + latency_s
        choices.append(("stripes", single_vertex(source), alone))
    if not leaving:
        choices += _trees(source, hosts, nbytes, up, latency_s)
    rates = speeds.described((source, *receivers))
    return _best(choices, f"{nbytes} bytes to {len(receivers)} nodes", rates)


def reduction(
    kind: str,
    nbytes: int,
    sent: Mapping[int, int],
    destinations: Sequence[int],
    speeds: LinkSpeeds,
    *,
    ordered: bool = False,
    leaving: Collection[int] = (),
) -> StripePlan:
    """The stripe plan for a fold. `sent`: the number of members on each contributing node, in order
    of arrival. `ordered`: the members are sent separately and folded from left to right."""
    what = f"{kind} of {nbytes} bytes from {len(sent)} nodes to {len(destinations)}"
    if kind == "reduce_scatter":
        stripes = tuple(
            Stripe(owner, begin, end)
            for owner, (begin, end) in zip(destinations, halves(len(destinations)), strict=True)
        )
        return StripePlan("stripes", stripes, 0.0, f"{what}: each destination owns its slice")
    if len(sent) == 1 and set(sent) == set(destinations):
        return StripePlan("stripes", single_vertex(destinations[0]), 0.0, f"{what}: on one node")
    if kind == "reduce" and len(destinations) == 1 and not ordered:
        return _to_one(what, nbytes, list(sent), destinations[0], speeds, leaving)
    return _to_many(what, nbytes, sent, destinations, speeds, ordered, leaving)


def _to_one(
    what: str,
    nbytes: int,
    contributors: list[int],
    destination: int,
    speeds: LinkSpeeds,
    leaving: Collection[int],
) -> StripePlan:
    """The stripe plan for a fold to one destination, which is the mirror image of a broadcast. The
    destination folds its own contribution last."""
    others = [node for node in contributors if node != destination]
    down = speeds.hosts((destination,))[0].down
    hosts = [HostRates(down, up) for up, down in speeds.hosts(others)]
    latency_s = speeds.latency_s((destination, *others))
    _, direct, shares = cost.broadcast(nbytes, down, hosts)
    if leaving and any(node in leaving for node in others):
        shares = [0.0 if n in leaving else s for n, s in zip(others, shares, strict=True)]
        if not any(shares):
            direct = 1.0
    direct, shares = _few(nbytes, direct, shares)
    total = direct + sum(shares)
    direct, shares = direct / total, [share / total for share in shares]
    transfer_s = cost.broadcast_s(nbytes, down, hosts, direct, shares)
    stripes = cut([*zip(others, shares, strict=True), (destination, direct)])
    streams = len(others) - 1 + _positive(shares)
    alone = len(others) * (nbytes / down + cost.STREAM_S) + latency_s
    choices = [
        ("stripes", stripes, cost.one_hop_s(transfer_s, streams, latency_s)),
        ("stripes", single_vertex(destination), alone),
    ]
    if not leaving:
        choices += _trees(destination, hosts, nbytes, down, latency_s)
    return _best(choices, what, speeds.described((destination, *others)))


def _to_many(
    what: str,
    nbytes: int,
    sent: Mapping[int, int],
    destinations: Sequence[int],
    speeds: LinkSpeeds,
    ordered: bool,
    leaving: Collection[int],
) -> StripePlan:
    """The stripe plan for any other fold. Among equal nodes, the first to arrive own stripes."""
    wanted_by = set(destinations)
    nodes = [*sent, *[node for node in destinations if node not in sent]]
    hosts = speeds.hosts(nodes)
    members = [*sent.values(), *[0] * (len(nodes) - len(sent))]
    travelling = members if ordered else [min(1, count) for count in members]
    wanted = [node in wanted_by for node in nodes]
    may_own = [node not in leaving for node in nodes] if leaving else []
    if not any(may_own):
        may_own = [True] * len(nodes)
    if all(may_own) and all(wanted) and travelling.count(1) == len(nodes):
        _, shares = cost.allreduce(nbytes, hosts)
    else:
        _, shares = cost.folding(nbytes, hosts, travelling, wanted, may_own)
    _, shares = _few(nbytes, 0.0, shares)
    total = sum(shares)
    shares = [share / total for share in shares]
    transfer_s = cost.folding_s(nbytes, hosts, travelling, wanted, shares)
    latency_s = speeds.latency_s(nodes)
    streams = sum(travelling) + _positive(shares)
    stripes = cut(zip(nodes, shares, strict=True))
    choices = [("stripes", stripes, cost.one_hop_s(transfer_s, streams, latency_s))]
    if not ordered and not leaving:
        both = [down if down < up else up for up, down in hosts]
        rate = max(both)
        root = both.index(rate)
        others = [*hosts[:root], *hosts[root + 1 :]]
        choices += _trees(nodes[root], others, nbytes, rate, latency_s, both_ways=True)
    if ordered:
        what = f"{what}, {sum(members)} members one by one"
    return _best(choices, what, speeds.described(nodes))


def _positive(shares: Sequence[float]) -> int:
    """The number of shares above 0. No share may be negative."""
    return len(shares) - shares.count(0.0)


def _few(nbytes: int, direct: float, shares: list[float]) -> tuple[float, list[float]]:
    """Keeps only the largest shares, at most one for each STRIPE_BYTES_MIN of the object."""
    stripes_max = max(1, nbytes // STRIPE_BYTES_MIN)
    if len(shares) + 1 <= stripes_max or _positive(shares) + (direct > 0) <= stripes_max:
        return direct, shares
    # The sort is stable, so the first of several equal shares are kept.
    ranked = sorted(range(len(shares)), key=lambda index: -shares[index])
    kept = set(ranked[: stripes_max - (1 if direct > 0 and stripes_max > 1 else 0)])
    few = [share if index in kept else 0.0 for index, share in enumerate(shares)]
    return (direct if stripes_max > 1 or not any(few) else 0.0), few


def _trees(
    root: int,
    others: Sequence[HostRates],
    nbytes: int,
    rate: float,
    latency_s: float,
    *,
    both_ways: bool = False,
) -> list[tuple[str, tuple[Stripe, ...], float]]:
    slowest = min(chain.from_iterable(others), default=rate)
    return [
        (
            f"tree:{degree}",
            single_vertex(root),
            cost.tree_s(
                len(others), degree, nbytes, min(rate, slowest), latency_s, both_ways=both_ways
            ),
        )
        for degree in DEGREES
        if degree < len(others)
    ]


def _best(
    choices: list[tuple[str, tuple[Stripe, ...], float]], what: str, rates: tuple[NodeRate, ...]
) -> StripePlan:
    """Returns the fastest choice, with the estimates for all choices."""
    shape, stripes, seconds = min(choices, key=lambda choice: choice[2])
    ranked = [
        (one, len(owners(cuts)), taken)
        for one, cuts, taken in sorted(choices, key=lambda choice: choice[2])
    ]
    named = [f"{one} over {count} owners {taken * 1e3:.3g} ms" for one, count, taken in ranked]
    estimates = tuple(estimate(*one) for one in ranked)
    return StripePlan(shape, stripes, seconds, f"{what}: {', '.join(named)}", estimates, rates)
