"""Passive estimates for pairs of hosts: paths to this host that are narrower than the hosts' links.

A LAN need not be a star. A plan must send little along a path that is narrower than the links of
its two hosts (racks, switches in a chain, a cable with a lower negotiated rate). But most flows are
slow for other reasons: the sender has no data yet, or a link is shared. A path counts as narrow if
three conditions hold together:

1. The flow is backlogged: for most of a stretch of WINDOW_S its sender had more to send than its
socket accepted.
2. Neither host's link is full in that stretch.
3. The flow has less than half of its fair share of each of the two links. Flows share a link about
equally, though not exactly.

The sender can check the first condition and its own link. If the flow is slow although the link is
not full, it sends PathCongested to the receiver. The receiver checks its own link, and measures the
rate, because bytes that a sender has written to a socket may not have arrived. The rate of the
fastest stretch of a burst counts, because the path is at least that wide. A narrow path has nearly
the same rate in every stretch. If the flow was much faster at another time in the burst, it was
slowed by a busy processor, or by TCP after a loss, so the burst is ignored. A pair is reported
after BURSTS_MIN bursts that agree. It is reported again while bursts confirm it, because the
manager forgets unconfirmed rates of pairs (_planner/link_speeds.py). A faster stretch of a known
pair raises its rate immediately.

The same samples show when this host's own link becomes slow during a burst: flows to several hosts
are backlogged, and together they have less than half of the link's rate.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._node.peers.link_estimator import LOWER_WEIGHT
from hoplite_mp._planner.link_speeds import STAR_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.messages import Member

__all__ = ["Flow", "PathEstimator"]

# Length of a stretch. Lower: the end of an exchange, where some pairs finish before others, is
# mistaken for narrow paths. Higher: only larger objects reveal narrow paths.
WINDOW_S = 0.15
# A flow counts as backlogged if it was backlogged for this share of a stretch. Lower: a sender that
# relays incoming data with pauses is mistaken for one behind a narrow path.
BACKLOGGED = 0.8
# A link counts as full above this share of its rate. Higher: full links that are slowed by busy
# processors do not count as full.
FULL = 0.8
# A flow counts as congested if its rate is below this fraction of an equal share of the link.
# Higher: less important narrow paths are found, but also flows that TCP has treated unfairly.
CONGESTED = 0.5
# Maximum ratio of the rate in the fastest stretch of a burst to the rate in the congested stretch.
# Higher: more flows that were only briefly slow count as congested.
STEADY = 1.3
# The number of bursts that must agree, within a factor of AGREEING, before a pair is reported.
# Higher: fewer mistakes, but later reports.
BURSTS_MIN = 2
AGREEING = 1.5
# A flow that has moved fewer bytes in a stretch is ignored there.
FLOW_BYTES_MIN = 64 << 10
# Minimum interval of PathCongested messages about one flow. Lower: more messages.
SAY_AGAIN_S = 0.25
# This host's link has become slow if it sends at less than this share of its rate for SLOW_S while
# flows to SLOW_FLOWS_MIN or more hosts are backlogged (a single flow may be slow because of its
# receiver). A higher share or a shorter time: plans change for hosts that are only briefly slow.
SLOW = 0.5
SLOW_S = 0.3
SLOW_FLOWS_MIN = 2
# A pair is reported again when its rate has changed by this fraction, or after TELL_AGAIN_S, which
# is a quarter of the time for which the manager remembers the pair (PAIR_S).
TELL_CHANGE = 0.1
TELL_AGAIN_S = 75.0


class Flow(NamedTuple):
    """Totals of the traffic between this host and another host."""

    sent: int  # bytes
    received: int  # bytes
    backlogged_ns: int  # time in which there was more to send than the sockets accepted


@dataclass(slots=True)
class _Pair:
    """The estimate for the path from one host to this one."""

    rate: float  # bytes per second
    bursts: int = 1  # number of bursts that agree
    reported: float = 0.0  # the rate last reported to the manager; 0.0: no report yet
    reported_at: float = 0.0


class PathEstimator:
    """The paths to one host. Senders are identified by the numbers of their nodes."""

    def __init__(
        self,
        flows: Callable[[], Mapping[int, Flow]],
        rates: Callable[[], tuple[float, float]],
        loop: LoopPort,
        say: Callable[[int], None],
        tell: Callable[[int, float], None],
    ) -> None:
        """flows: returns the flow for each node on another host. rates: returns the rates of this
        host's link (up, down), 0 while unknown. say: sends PathCongested to a node. tell: reports
        the rate of the path from a node to this one to the manager."""
        self.flows = flows
        self.rates = rates
        self.loop = loop
        self.say = say
        self.tell = tell
        self.known: dict[int, _Pair] = {}
        self.peaks: dict[int, float] = {}  # sender -> rate in the fastest stretch of this burst
        self.held: dict[int, float] = {}  # sender -> rate of its congested flow in this burst
        self.backlogged_s = 0.0  # seconds of this burst in which a flow from here was backlogged
        self._slow_since: float | None = None
        self._slow_reported_at: float | None = None
        self._when_slow: list[Callable[[int, int], None]] = []
        self._received: dict[int, float] = {}  # sender -> bytes per second in the latest stretch
        self._sent_at: dict[int, float] = {}  # node -> time at which PathCongested was sent to it
        self._samples: deque[tuple[float, Mapping[int, Flow]]] = deque()

    def when_slow(self, tell: Callable[[int, int], None]) -> None:
        """Registers `tell`, which is called when this host's link becomes slow during a burst, and
        again while it stays slow. Its arguments are the link's rates (up, down) in bytes per
        second."""
        self._when_slow.append(tell)

    def begin(self) -> None:
        """Called at the start of a burst."""
        self._samples.clear()
        self._slow_since = None
        self._received, self.peaks = {}, {}
        self.backlogged_s = 0.0
        self.held.clear()

    def sample(self) -> None:
        """Called every few hundredths of a second during a burst."""
        now = self.loop.now()
        self._samples.append((now, self.flows()))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        (begun, before), (_, after) = self._samples[0], self._samples[-1]
        elapsed = now - begun
        if elapsed < WINDOW_S:
            return
        moved = {}
        for node, flow in after.items():
            old = before.get(node, Flow(0, 0, 0))
            # The counters of ended links are missing, so a difference may be negative.
            moved[node] = Flow(*(max(0, b - a) for a, b in zip(old, flow, strict=True)))
        self._report_congested(now, elapsed, moved)
        self._report_slow(now, elapsed, moved)
        self._received = {
            node: flow.received / elapsed
            for node, flow in moved.items()
            if flow.received >= FLOW_BYTES_MIN
        }
        for node, rate in self._received.items():
            self.peaks[node] = max(self.peaks.get(node, 0.0), rate)

    def _report_congested(self, now: float, elapsed: float, moved: Mapping[int, Flow]) -> None:
        """Sends PathCongested for congested flows, unless this host's own link is full."""
        backlogged = {
            node: flow.sent / elapsed
            for node, flow in moved.items()
            if flow.backlogged_ns >= BACKLOGGED * elapsed * 1e9 and flow.sent >= FLOW_BYTES_MIN
        }
        if backlogged:
            self.backlogged_s += now - self._samples[-2][0]
        link = self.rates()[0]
        if sum(flow.sent for flow in moved.values()) >= FULL * link * elapsed:
            return
        for node, rate in backlogged.items():
            sent_at = self._sent_at.get(node)
            if rate < CONGESTED * link / len(backlogged) and (
                sent_at is None or now - sent_at >= SAY_AGAIN_S
            ):
                self._sent_at[node] = now
                self.say(node)

    def _report_slow(self, now: float, elapsed: float, moved: Mapping[int, Flow]) -> None:
        """Calls the functions registered by `when_slow` if this host's link is slow."""
        waiting = [
            flow for flow in moved.values() if flow.backlogged_ns >= BACKLOGGED * elapsed * 1e9
        ]
        sent = sum(flow.sent for flow in moved.values())
        if len(waiting) < SLOW_FLOWS_MIN or not 0 < sent < SLOW * self.rates()[0] * elapsed:
            self._slow_since = None
            return
        if self._slow_since is None:
            self._slow_since = now - elapsed
        reported_at = self._slow_reported_at
        if now - self._slow_since >= SLOW_S and (
            reported_at is None or now - reported_at >= SAY_AGAIN_S
        ):
            self._slow_reported_at = now
            received = sum(flow.received for flow in moved.values())
            for tell in self._when_slow:
                tell(int(sent / elapsed), int(received / elapsed))

    def congested(self, node: int) -> None:
        """Handles PathCongested from a node: the node's own link does not limit its flow to this
        host."""
        link, rate = self.rates()[1], self._received.get(node)
        if rate is None or sum(self._received.values()) >= FULL * link:
            return
        if rate < CONGESTED * link / len(self._received):
            self.held[node] = max(rate, self.held.get(node, 0.0))

    def end(self) -> None:
        """Ends a burst: updates the estimates for paths, and reports them."""
        link = self.rates()[1]
        for node, peak in self.peaks.items():
            steady = peak <= STEADY * self.held.get(node, 0.0)
            if steady and peak < STAR_TOLERANCE * link:
                self._confirm(node, peak)
            elif node in self.known and peak > self.known[node].rate:
                self._widen(node, peak, link)

    def _confirm(self, node: int, peak: float) -> None:
        pair = self.known.get(node)
        if pair is None:
            self.known[node] = _Pair(peak)
            return
        if peak > AGREEING * pair.rate or AGREEING * peak < pair.rate:
            pair.bursts = 0
        pair.bursts += 1
        lowered = pair.rate + LOWER_WEIGHT * (peak - pair.rate)
        pair.rate = max(peak, lowered)
        now = self.loop.now()
        if pair.bursts >= BURSTS_MIN and (
            abs(pair.rate - pair.reported) > TELL_CHANGE * pair.reported
            or now - pair.reported_at >= TELL_AGAIN_S
        ):
            self._tell(node, pair, now)

    def _widen(self, node: int, peak: float, link: float) -> None:
        pair = self.known[node]
        pair.rate = peak
        if pair.reported and peak > (1 + TELL_CHANGE) * pair.reported:
            self._tell(node, pair, self.loop.now())
        if peak >= STAR_TOLERANCE * link:
            del self.known[node]

    def _tell(self, node: int, pair: _Pair, now: float) -> None:
        pair.reported, pair.reported_at = pair.rate, now
        self.tell(node, pair.rate)

    def tell_next_manager(self) -> None:
        """Makes the next burst that confirms a pair report its rate, because a new manager knows no
        rates of pairs."""
        for pair in self.known.values():
            pair.reported = pair.reported_at = 0.0

    def peer_lost(self, member: Member) -> None:
        """Forgets a lost node, because it may be on another cable after a restart."""
        for table in (self.known, self._sent_at, self.peaks, self._received, self.held):
            table.pop(member.node, None)
