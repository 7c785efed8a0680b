"""The cost model: formulas for the durations of stripe plans.

The model of a LAN is a star: host i can send u_i and receive d_i bytes per second at the same time,
and the switch does not block. With latency L, and o seconds for each stream that a node opens, an
operation on S bytes over links of B bytes per second takes:

    chain            n (L + o + b/B) + S/B
    tree of degree d log_d(n) (L + d (o + b/B)) + d S/B
    star             L + n o + n S/B
    one-hop stripes  2 L + (streams of the busiest node) o + T

where b is the size of a block. A node must have received a block completely before it forwards the
block. A block is at most an eighth of a stripe, so the formula for stripes ignores b. T is the time
that the busiest direction of any host's link needs for its bytes. Each node forwards the blocks
that have arrived so far, and a stripe's bytes flow at the same rate on both hops. T is reached if
every stream has the rate (its bytes / T): then no direction exceeds its capacity, and no child
receives faster than its parent. `broadcast` and `allreduce` choose the shares of the stripes such
that T is minimal.

The formulas for chain, tree and star follow Hoplite (Zhuang et al., SIGCOMM 2021), section 3. The
bounds for one-hop stripes follow Blink's one-hop trees (Wang et al., MLSys 2020), here with unequal
links.
"""

from __future__ import annotations

import math
from operator import le, truediv
from typing import TYPE_CHECKING

from hoplite_mp._common.transfer_model import block_bytes_for
from hoplite_mp._protocol.fields import SHARES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hoplite_mp._planner.link_speeds import HostRates
    from hoplite_mp._protocol.messages import Distribute

# The seconds that each further stream costs the node that opens it: a request, a cell, a wake-up.
# Higher: more operations use trees with few children instead of one hop between all nodes.
STREAM_S = 20e-6
# The maximum block size of a node's engine (_node/peers/links.py). With a value below the real
# size, long chains would be chosen even though each hop delays the bytes by milliseconds.
BLOCK_BYTES_MAX = 256 << 10
# Number of bisection steps in the search for the least T. With 24 steps the error is below 1e-6.
_HALVINGS = 24


def tree_s(
    count: int, degree: int, nbytes: int, rate: float, latency_s: float, *, both_ways: bool = False
) -> float:
    """Seconds for a tree with `count` nodes below the root. A tree of degree 1 is a chain.

    `both_ways`: the bytes move up the tree and down again, at the same time. An inner node then
    sends its contribution to its parent and the result to each child: d + 1 times the bytes.
    """
    if count == 0:
        return 0.0
    if degree == 1:
        depth: float = count
    else:
        depth = max(1.0, math.log(count * (degree - 1) + 1, degree))
    children = min(degree, count)
    block_s = block_bytes_for(nbytes, BLOCK_BYTES_MAX) / rate
    setup = depth * (latency_s + children * (STREAM_S + min(block_s, nbytes / rate)))
    if both_ways:
        return 2 * setup + (children + (count > 1)) * nbytes / rate
    return setup + children * nbytes / rate


def one_hop_s(transfer_s: float, streams: int, latency_s: float) -> float:
    """Seconds for stripes that move to their owner, and from there to all other nodes."""
    return 2 * latency_s + streams * STREAM_S + transfer_s


def broadcast(
    nbytes: int, source_up: float, receivers: Sequence[HostRates]
) -> tuple[float, float, list[float]]:
    """Returns (T, the share that the source itself sends to all receivers, the share that each
    receiver forwards to the others).

    T = max{ S/u_s, S/min d_i, nS/(u_s + Σ u_i) } for n receivers. With up and down exchanged, the
    formula describes the reduction to one node, in which the bytes flow to the destination.
    """
    count = len(receivers)
    if count == 0:
        return 0.0, 0.0, []
    ups, downs = zip(*receivers, strict=True)
    slowest = min(downs)
    if count == 1:
        return nbytes / min(source_up, slowest), 0.0, [1.0]
    per_byte = max(1 / source_up, 1 / slowest, count / (source_up + sum(ups)))
    width = per_byte / (count - 1)
    forwarded = [width * up for up in ups]
    if max(forwarded) > 1:
        forwarded = [min(1.0, share) for share in forwarded]
    total = sum(forwarded)
    if total >= 1:
        return per_byte * nbytes, 0.0, [share / total for share in forwarded]
    return per_byte * nbytes, 1 - total, forwarded


def broadcast_s(
    nbytes: int,
    source_up: float,
    receivers: Sequence[HostRates],
    direct: float,
    shares: Sequence[float],
) -> float:
    """The time T of a broadcast with given shares (see `broadcast`)."""
    count = len(receivers)
    if not count:
        return 0.0
    ups, downs = zip(*receivers, strict=True)
    forwarding: float = (count - 1) * max(map(truediv, shares, ups))
    busiest: float = max((sum(shares) + count * direct) / source_up, forwarding, 1 / min(downs))
    return busiest * nbytes


def narrow_s(plan: Distribute, rates: Mapping[tuple[int, int], float]) -> float:
    """The longest time in seconds that any of these (sender, receiver) pairs needs in a plan with
    rule "stripes". rates: bytes per second of each pair."""
    widths = dict.fromkeys(rates, 0)
    for index, stripe in enumerate(plan.stripes):
        owner, width = stripe.owner, stripe.end_share - stripe.begin_share
        if owner in plan.receivers:
            fed = plan.sources[index % len(plan.sources)], owner
            widths[fed] = widths.get(fed, 0) + width
        for receiver in plan.receivers:
            if receiver != owner:
                edge = owner, receiver
                widths[edge] = widths.get(edge, 0) + width
    return max(widths[edge] / SHARES * plan.nbytes / rate for edge, rate in rates.items())


def allreduce(nbytes: int, hosts: Sequence[HostRates]) -> tuple[float, list[float]]:
    """Returns (T, the share that each host owns). All hosts contribute and receive the result.

    T = S max{1/b_min, 2(n-1)/Σ b_i}, b_i = min(u_i, d_i);
    f_i = clip((T b_i/S - 1)/(n-2), 0, 1), scaled to sum 1.
    """
    count = len(hosts)
    if count == 1:
        return 0.0, [1.0]
    both = [down if down < up else up for up, down in hosts]
    per_byte = max(1 / min(both), 2 * (count - 1) / sum(both))
    if count == 2:
        return per_byte * nbytes, [0.5, 0.5]
    owned = [(per_byte * rate - 1) / (count - 2) for rate in both]
    if max(owned) > 1 or min(owned) < 0:
        owned = [min(1.0, max(0.0, share)) for share in owned]
    total = sum(owned)
    return per_byte * nbytes, [share / total for share in owned]


def folding_s(
    nbytes: int,
    hosts: Sequence[HostRates],
    sent: Sequence[int],
    wanted: Sequence[bool],
    shares: Sequence[float],
) -> float:
    """The time T of a fold with given shares of the owners. `sent[i]`: the number of contributions
    that host i sends separately. `wanted[i]`: whether host i is a destination."""
    contributions, destinations = sum(sent), sum(wanted)
    rows = list(zip(hosts, sent, wanted, shares, strict=True))
    ups = [(own * (1 - x) + (destinations - want) * x) / up for (up, _), own, want, x in rows]
    downs = [
        ((contributions - own) * x + want * (1 - x)) / down for (_, down), own, want, x in rows
    ]
    return max(0.0, *ups, *downs) * nbytes


def folding(
    nbytes: int,
    hosts: Sequence[HostRates],
    sent: Sequence[int],
    wanted: Sequence[bool],
    may_own: Sequence[bool],
) -> tuple[float, list[float]]:
    """Returns (T, the shares of the owners) for any set of contributors and destinations.

    The bytes that each host sends and receives are linear functions of its own share. Each value of
    T therefore allows each host a range of shares. (If the bytes decrease with a larger share, the
    function bounds the share from below.) The least T at which shares within these ranges can add
    up to 1 is found by bisection. At least one host must be allowed to own a share.
    """
    contributions, destinations = sum(sent), sum(wanted)
    rows = []
    for host, own, want, may in zip(hosts, sent, wanted, may_own, strict=True):
        lines = (
            (own, destinations - want - own, host.up),
            (int(want), contributions - own - want, host.down),
        )
        rows.append((lines, 1.0 if may else 0.0))

    def ranges(per_byte: float) -> tuple[list[float], list[float]]:
        least, most = [], []
        for lines, high in rows:
            low = 0.0
            for fixed, slope, rate in lines:
                spare = per_byte * rate - fixed
                if slope > 0:
                    high = min(high, max(0.0, spare / slope))
                elif slope < 0:
                    low = max(low, spare / slope)
            least.append(low)
            most.append(high)
        return least, most

    def suffices(per_byte: float) -> bool:
        least, most = ranges(per_byte)
        return sum(least) <= 1 <= sum(most) and all(map(le, least, most))

    low = max((f / r for lines, _ in rows for f, s, r in lines if s >= 0), default=0.0)
    high = max(low, 1 / min(min(host) for host in hosts))
    while not suffices(high):
        high *= 2
    if suffices(low):
        high = low
    else:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
    least, most = ranges(high)
    needed, possible = sum(least), sum(most)
    if needed == 0:
        shares = [share / possible for share in most]
    else:
        part = (1 - needed) / (possible - needed) if possible > needed else 0.0
        shares = [a + part * (b - a) for a, b in zip(least, most, strict=True)]
    return folding_s(nbytes, hosts, sent, wanted, shares), shares
