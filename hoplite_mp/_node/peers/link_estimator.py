"""Passive estimates of this host's rates, from the traffic of its links.

Active probes would use up the bandwidth that they measure, so the counters of all links are sampled
while bytes are moving. A collective sends everything at once when it begins, so the fastest stretch
(a period of STRETCH_S) of a burst shows how fast the host can send and receive. A faster stretch
raises an estimate immediately. An estimate is lowered gradually, and only by bursts that should
have filled the link in that direction: a host that sends one of three contributions to a gather is
not slow. The estimate for sending is lowered immediately if two bursts in a row agree and their
bytes waited for the link. The host has then become slow, and the next plans must assign it fewer
bytes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from hoplite_mp._protocol.messages import LinkMeasured
from hoplite_mp._protocol.peers import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.questions import Answer, Questions
    from hoplite_mp._protocol.messages import Member

__all__ = ["LinkEstimator", "Probing"]


# Sampling intervals in the first YOUNG_S of a burst, and afterwards. Lower: more turns of the
# node's loop, each of which takes about 300 us of processor time.
POLL_S = 0.03
LATER_POLL_S = 0.09
# Higher: more samples in each burst. Lower: in a short burst, full and idle times of the link fall
# into the same stretch.
YOUNG_S = 0.15
# Length of a stretch. Lower: bytes that a switch has only buffered raise the estimate. Higher:
# fewer stretches in which a link is full, because links are rarely full for so long.
STRETCH_S = 0.06
# A stretch with fewer bytes is ignored, because the sender may have had no more. A link of less
# than 140 Mbit/s is therefore not measured, and its rate counts as unknown.
STRETCH_BYTES_MIN = 1 << 20
LOWER_WEIGHT = 0.15  # weight of a slower burst in the new estimate
# Two bursts agree if neither is more than this many times as fast as the other. Lower: a slow host
# is detected later. Higher: bursts that were slowed by busy processors count.
AGREEING = 1.25
UP = 0  # index of the sending direction in pairs (up, down)
# A burst can lower the estimate for sending immediately only if bytes have waited for the link for
# this many seconds of the burst.
BACKLOGGED_S = 0.1
# A burst ends after this time without a byte. Higher: more useless samples.
QUIET_S = 0.5
# A transfer that follows a burst of at least this length begins another burst, even without a
# pause. Otherwise a series of calls would be a single burst, whose fastest stretch would hide that
# the host has since become slow. Higher: more calls pass before a slow host is detected. Lower:
# bursts are too short to agree.
LONG_S = 0.3
# The manager is notified when a rate has changed by more than this fraction. Lower: more messages.
SENT_CHANGE = 0.05


class BurstFollower(Protocol):
    """A component that follows the bursts of a link estimator, as PathEstimator does."""

    def begin(self) -> None:
        """Called at the start of a burst."""

    def sample(self) -> None:
        """Called at each sample of a burst."""

    def end(self) -> None:
        """Called at the end of a burst, when the link estimator has updated its rates."""

    @property
    def backlogged_s(self) -> float:
        """The seconds in which a flow from this host had more to send than its socket accepted."""


class LinkEstimator:
    """The estimated rates of one host in both directions, in bytes per second; 0.0 while
    unknown."""

    def __init__(
        self,
        moved: Callable[[], tuple[int, int]],
        loop: LoopPort,
        tell: Callable[[int, int], None] = lambda up, down: None,
        follower: BurstFollower | None = None,
    ) -> None:
        """moved: returns the bytes (sent, received) so far. tell: called with new rates (up, down).
        follower: notified of the same bursts."""
        self.moved = moved
        self.tell = tell
        self.follower = follower
        self.loop = loop
        self.users = 0
        self.known = [0.0, 0.0]
        self.peaks = [0.0, 0.0]  # rates in the fastest stretches of this burst
        self.full = [False, False]  # whether this burst should have filled the link
        self.sent = (0, 0)
        # the last burst's sending peak, if it was backlogged and below the estimate
        self._slower = 0.0
        self._begun_at = 0.0  # time at which the first of the current transfers began
        self._ended_at = 0.0  # time at which the last transfer ended
        self._moved_at = 0.0
        self._samples: deque[tuple[float, int, int]] = deque()
        self._measuring = False  # a burst has begun
        self._waiting = False  # a timer is set

    def begin(self, full: tuple[bool, bool] = (True, True)) -> None:
        """Called when a transfer begins. full: whether this host's link limits the transfer (up,
        down)."""
        now = self.loop.now()
        if not self.users:
            if self._measuring and now - self._ended_at >= POLL_S:
                self._finish()  # the last burst ended before this transfer began
            self._begun_at = now
        self.users += 1
        if not self._measuring:
            self._measuring = True
            self._samples.clear()
            self.peaks, self.full = [0.0, 0.0], [False, False]
            self._moved_at = now
            if self.follower is not None:
                self.follower.begin()
            self._sample_again()
            if not self._waiting:
                self._sample_after(POLL_S)
        self.full = [before or now for before, now in zip(self.full, full, strict=True)]

    def end(self) -> None:
        """Called when a transfer has ended, once for each `begin`."""
        self.users -= 1
        if not self.users:
            self._ended_at = self.loop.now()
            if self._measuring and self._ended_at - self._begun_at >= LONG_S:
                self._sample()  # includes the bytes since the last sample
                self._finish()  # so that the plan for the next call uses the new rates

    @property
    def rates(self) -> tuple[int, int]:
        """The current estimates (up, down), including this burst."""
        up, down = (max(known, peak) for known, peak in zip(self.known, self.peaks, strict=True))
        return int(up), int(down)

    def _sample_after(self, seconds: float) -> None:
        self._waiting = True
        self.loop.call_later(seconds, self._poll)

    def _sample_again(self) -> None:
        self._sample()
        if self.follower is not None:
            self.follower.sample()

    def _poll(self) -> None:
        self._waiting = False
        if not self._measuring:
            return
        self._sample_again()
        now = self.loop.now()
        if self.users and now - self._moved_at < QUIET_S:
            self._sample_after(POLL_S if now - self._begun_at < YOUNG_S else LATER_POLL_S)
        else:
            self._finish()

    def _finish(self) -> None:
        """Ends a burst: updates the rates, and notifies the manager of changes."""
        self._measuring = False
        for i, peak in enumerate(self.peaks):
            if peak > self.known[i]:
                # The first estimate must come from a full link, because otherwise it is too low.
                if self.full[i] or self.known[i]:
                    self.known[i] = peak
                if i == UP:
                    self._slower = 0.0
            elif peak and self.full[i]:
                self._lower(i, peak)
        if any(
            abs(now - sent) > SENT_CHANGE * sent
            for now, sent in zip(self.known, self.sent, strict=True)
        ):
            self.sent = up, down = int(self.known[0]), int(self.known[1])
            self.tell(up, down)
        if self.follower is not None:
            self.follower.end()

    def _lower(self, i: int, peak: float) -> None:
        """Lowers an estimate after a slower burst that should have filled the link."""
        self.known[i] += LOWER_WEIGHT * (peak - self.known[i])
        if i != UP:
            return  # a receiver cannot tell whether bytes have waited for its link
        before, self._slower = self._slower, 0.0
        if self.follower is not None and self.follower.backlogged_s >= BACKLOGGED_S:
            self._slower = peak
            if before and 1 / AGREEING <= peak / before <= AGREEING:
                self.known[i] = min(self.known[i], max(peak, before))

    def _sample(self) -> None:
        now = self.loop.now()
        sample = (now, *self.moved())
        if not self._samples or sample[1:] != self._samples[-1][1:]:
            self._moved_at = now
        self._samples.append(sample)
        while len(self._samples) > 2 and now - self._samples[1][0] >= STRETCH_S:
            self._samples.popleft()
        first, last = self._samples[0], self._samples[-1]
        elapsed = last[0] - first[0]
        if elapsed < STRETCH_S:
            return
        for i in range(2):
            nbytes = last[1 + i] - first[1 + i]
            if nbytes >= STRETCH_BYTES_MIN:
                self.peaks[i] = max(self.peaks[i], nbytes / elapsed)


# Latencies to other nodes, measured once when this node joins.
#
# The planner weighs the depth of a tree against the number of its streams, for which it needs the
# latency. A node that has joined sends a few short messages, one after another, to some of the
# earlier members. Rates are never probed.


# The number of nodes that are probed. Higher: more connections that may not be needed otherwise.
PEERS_MAX = 8
# The number of round trips to each node. The first one includes connection setup and is discarded.
# The fastest of the others counts.
ROUNDS = 4


class Probing:
    """The probes of one node."""

    def __init__(
        self, number: Callable[[], int], questions: Questions, tell: Callable[[Any], None]
    ) -> None:
        """number: returns this node's number. tell: sends a message to the manager."""
        self.number = number
        self.questions = questions
        self.tell = tell

    def begin(self, members: Iterable[Member]) -> None:
        """Probes the latest members, because they probably have the fewest connections."""
        for member in list(members)[-PEERS_MAX:]:
            self._ask(member.host_id, ())

    def _ask(self, host_id: int, trips_ns: tuple[int, ...]) -> None:
        """Sends the next probe to the host. trips_ns: the times of the round trips so far."""

        def answered(answer: Answer | None) -> None:
            if answer is None:
                return  # the host is gone
            trips = *trips_ns, answer.came_ns - answer.asked_ns
            if len(trips) < ROUNDS:
                self._ask(host_id, trips)
            else:
                self.tell(LinkMeasured(self.number(), answer.node, min(trips[1:]) / 2e9))

        self.questions.ask(host_id, Probe, answered)
