"""Plans copies of immutable objects: who sends to whom, as receivers arrive and senders fail.

There are two kinds of plans. **A spread** serves the receivers of a broadcast, which are known from
the start. They share one `StripePlan`: every receiver waits only for a source, or for the owner of
a stripe, and this owner waits for a source. **A single** serves one receiver that has requested the
object itself (a get). The parents of a single are the holders with the most spare up rate; their
copies may be complete or still arriving. The first receiver therefore streams from the object's
owner, and the next receiver from the first. The owner sends little more than one copy, however many
nodes request the object.

Invariant: nodes never wait for each other in a cycle. Owners of a spread's stripes wait for nodes
with a complete copy. The parents of a single never wait for its receiver, directly or through other
nodes. No node waits for a new receiver yet. When an earlier receiver needs new parents, the nodes
that wait for it are excluded.

When a parent is lost, or a receiver reports that a parent failed, all receivers of that plan get a
new plan under a new epoch, and keep the bytes that they have received. If no holder is left, the
receiver is refused; nodes that waited for this receiver get new parents, or are refused in turn.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from hoplite_mp._planner import tree_shapes
from hoplite_mp._planner.directory import Directory, DirectoryEntry, Transfer
from hoplite_mp._planner.plan_cache import NarrowPaths, PlanCache, TreeCache
from hoplite_mp._planner.plan_log import PlanLog, PlanRecord
from hoplite_mp._planner.program import participants, shares_sent
from hoplite_mp._planner.repair import kept_cut
from hoplite_mp._protocol.messages import (
    SHARES,
    CopyDropped,
    Distribute,
    FetchComplete,
    FetchFailed,
    FetchRefused,
    FetchRequested,
    ObjectDeleted,
    Stripe,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hoplite_mp._planner.link_speeds import HostRates, LinkSpeeds
    from hoplite_mp._planner.manager_recovery import RunningCopy
    from hoplite_mp._planner.membership import ClusterMembership
    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.membership import ReportedCopy

# Maximum number of complete holders, and of incomplete holders, that are considered for a new
# receiver. The latest holders are considered, because they have served the fewest receivers.
# Higher: better parents in large clusters, but planning takes the manager longer.
CANDIDATES_MAX = 8
# Maximum number of parents of a late receiver. Higher: a faster receiver, more incast. In a
# broadcast to k receivers, each owner can spare 1/k of its link, so k owners fill another link.
PARENTS_MAX = 8
# Parents are added while more than this fraction of the receiver's down rate is unused.
UNUSED_MAX = 0.1
# A parent with less than this fraction of its up rate to spare can only serve a new receiver by
# slowing down its other receivers. Higher: fewer parents count as having a spare rate.
SPARE_MIN = 0.1
# Maximum number of sources in a spread. More would only lengthen the message.
SOURCES_NAMED_MAX = 16


class Copies:
    """All transfers of a cluster."""

    def __init__(self, membership: ClusterMembership, speeds: LinkSpeeds, log: PlanLog) -> None:
        self._membership = membership
        self._speeds = speeds
        self._log = log
        self._plan_cache = PlanCache(speeds)
        self._directory = Directory(membership)
        self._epoch = 0  # plans made so far
        self._busy: dict[int, float] = {}  # node -> bytes per second that it sends for all plans
        self.trees = TreeCache(speeds)
        self.notes: list[str] = []  # reasons for plans; the planner removes them

    @property
    def entries(self) -> dict[bytes, DirectoryEntry]:
        """The directory's entry of each object."""
        return self._directory.entries

    # ---- requests

    def fetch(self, message: FetchRequested, now: float) -> list[Send]:
        """Handles a node's request for a copy. A second request during the transfer is ignored."""
        node = message.node
        entry = self._directory.entry(message.object, message.nbytes, message.holders)
        if node in entry.receiving:
            return []
        sends: list[Send] = []
        listed = node in entry.whole
        if listed:  # the entry is out of date, because a node with a copy would not request one
            sends = self._strike(entry, node, now)
        sends += self._single(entry, node, now, waited_for=listed)
        self._directory.forget_if_over(entry)
        return sends

    def spread(
        self, object_id: bytes, nbytes: int, holders: Iterable[int], to: Iterable[int], now: float
    ) -> tuple[list[Send], set[int]]:
        """Plans copies to many nodes. Returns the messages to send, and the nodes that do not have
        a complete copy yet."""
        entry = self._directory.entry(object_id, nbytes, holders)
        lacking = {node for node in to if node not in entry.whole}
        receivers = [n for n in to if n in lacking and n not in entry.receiving]
        sends = self._spread(entry, receivers, now)
        self._directory.forget_if_over(entry)
        return sends, lacking

    # ---- reports

    def is_receiving(self, object_id: bytes, node: int, epoch: int) -> bool:
        """Whether this is the latest plan by which the node receives the object."""
        entry = self.entries.get(object_id)
        return entry is not None and entry.receiving.get(node) == epoch

    def complete(self, message: FetchComplete, now: float) -> list[Send]:
        """Records that a receiver has all bytes. The epoch shows whether the report is late, a
        duplicate, or from an earlier incarnation of the node. Such reports are ignored."""
        entry = self.entries.get(message.object)
        node = message.node
        if entry is None or entry.receiving.get(node) != message.epoch:
            return []
        del entry.receiving[node]
        entry.whole[node] = True
        transfer = entry.transfers[message.epoch]
        if transfer.record is not None:
            transfer.record.finish(node, now, last=len(transfer.waiting) == 1)
        return self._arrived(entry, message.epoch, node)

    def failed(self, message: FetchFailed, now: float) -> list[Send]:
        """Plans other parents for a receiver that has reported a failed parent. The failed node
        remains a parent of other receivers, because only the link to it may be at fault."""
        entry = self.entries.get(message.object)
        node = message.node
        if entry is None or entry.receiving.get(node) != message.epoch:
            return []
        self._directory.name(entry, (message.parent,))
        entry.failed.add((node, message.parent))
        transfer = entry.transfers[message.epoch]
        others = [other for other in transfer.waiting if other != node]
        # Other receivers may be waiting for bytes that this node will no longer receive. They also
        # get new plans, before this node.
        return self._replace(entry, [message.epoch], [others, [node]], now)

    def dropped(self, message: CopyDropped, now: float) -> list[Send]:
        """Records that a node deleted its copy, or stopped fetching it."""
        entry = self.entries.get(message.object)
        if entry is None:
            return []
        if message.node in entry.whole:
            entry.full = message.full
        sends = self._strike(entry, message.node, now)
        self._directory.forget_if_over(entry)
        return sends

    def gone(self, message: ObjectDeleted) -> list[Send]:
        """Ends every transfer of a deleted object, and sends every receiver a refusal."""
        entry = self.entries.get(message.object)
        if entry is None:
            return []
        self._directory.drop(entry)
        refused = FetchRefused(message.object, "deleted", "it was deleted")
        sends: list[Send] = [(node, refused) for node in entry.receiving]
        for epoch in list(entry.transfers):
            sends += self._withdraw(entry, epoch)
        return sends

    def lose(self, node: int, now: float) -> list[Send]:
        """Removes a dead node as a holder, receiver and parent of all objects."""
        sends: list[Send] = []
        for entry in self._directory.naming(node):
            if node in entry.whole:
                entry.full = ""
            sends += self._strike(entry, node, now)
            entry.failed = {pair for pair in entry.failed if node not in pair}
            entry.served.pop(node, None)
            self._directory.unname(entry, node)
            self._directory.forget_if_over(entry)
        return sends

    def needs(self, node: int) -> bool:
        """Whether this node takes part in a running plan."""
        return any(
            node in participants(transfer.plan)
            for entry in self._directory.naming(node)
            for transfer in entry.transfers.values()
        )

    def go_on(self, epochs: int, copied: int) -> None:
        """Continues the counts of the previous planner, so that no number is used twice."""
        self._epoch = max(self._epoch, epochs)
        self._directory.go_on(copied)

    def restore(
        self, held: Iterable[ReportedCopy], running: dict[int, RunningCopy], now: float
    ) -> list[Send]:
        """Records the nodes' copies, and their progress with the plans of the previous planner."""
        sends: list[Send] = []
        for epoch in sorted(running):
            self._epoch = max(self._epoch, epoch)
            plan = running[epoch].plan
            entry = self._directory.restore(plan)
            living = self._membership.is_living
            for node in filter(living, plan.sources):
                self._directory.name(entry, (node,))
                entry.whole.setdefault(node, False)
        for report in held:
            entry = self._directory.entry(report.object, report.nbytes, (report.node,))
            if report.node in entry.whole:
                entry.whole[report.node] = True
        broken: list[int] = []
        for epoch, copy in sorted(running.items()):
            entry, plan = self.entries[copy.plan.object], copy.plan
            seconds = plan.nbytes / min(self._speeds.hosts(participants(plan))).up
            before = dict(entry.receiving)
            self._start(entry, plan, now, seconds)
            for node in plan.receivers:
                if node not in copy.receiving:
                    del entry.transfers[epoch].waiting[node]
                    del entry.receiving[node]
                    if node in before:  # this node is still executing an earlier plan
                        entry.receiving[node] = before[node]
            entry.whole = {n: known for n, known in entry.whole.items() if n not in entry.receiving}
            without = [node for node in participants(plan) if node not in copy.at]
            if not copy.receiving:
                sends += self._withdraw(entry, epoch)
            elif all(node in entry.whole for node in without):
                sends += [(node, plan) for node in without]
            else:
                broken.append(epoch)
        for epoch in broken:
            entry = self._directory.restore(running[epoch].plan)
            # The transfer is None if its receivers have been refused in this loop.
            if (transfer := entry.transfers.get(epoch)) is not None:
                sends += self._replace(entry, [epoch], [list(transfer.waiting)], now)
        for entry in list(self.entries.values()):
            self._directory.forget_if_over(entry)
        return sends

    # ---- plans

    def _strike(self, entry: DirectoryEntry, node: int, now: float) -> list[Send]:
        """Removes a node that no longer holds or receives the object. Its children get new
        parents."""
        entry.whole.pop(node, None)
        entry.receiving.pop(node, None)
        sends: list[Send] = []
        hit: list[int] = []
        again: list[list[int]] = []
        for epoch, transfer in entry.transfers.items():
            if node in participants(transfer.plan):
                hit.append(epoch)
                again.append([other for other in transfer.waiting if other != node])
        if hit:
            sends += self._replace(entry, hit, again, now)
        return sends

    def _replace(
        self, entry: DirectoryEntry, epochs: list[int], receivers: list[list[int]], now: float
    ) -> list[Send]:
        """Replaces the plans of `epochs` with one new plan for each group in `receivers`. The new
        plans are sent before the old plans are withdrawn, so that no node releases the object in
        between."""
        before = [entry.transfers[epoch].plan for epoch in epochs]
        old: list[Send] = []
        for epoch in epochs:
            old += self._withdraw(entry, epoch)
        # These receivers cannot be parents until they have a new plan.
        for node in (node for group in receivers for node in group):
            entry.receiving.pop(node, None)
        sends: list[Send] = []
        for index, group in enumerate(receivers):
            if len(group) == 1:
                sends += self._single(entry, group[0], now)
            elif group:
                sends += self._spread(entry, group, now, before[min(index, len(before) - 1)])
        self._directory.forget_if_over(entry)
        return sends + old

    def _spread(
        self,
        entry: DirectoryEntry,
        receivers: list[int],
        now: float,
        before: Distribute | None = None,
    ) -> list[Send]:
        """Makes one plan for all these receivers if possible. `before`: their previous plan."""
        living = self._membership.living(receivers)
        if not living:
            return []
        if not entry.whole:
            return self._refuse(entry, living, now)
        if len(living) == 1 or any(pair[0] in living for pair in entry.failed):
            # A spread would ignore which receivers have reported which parents as failed.
            return [send for node in living for send in self._single(entry, node, now)]
        leaving = self._membership.leaving
        staying = [node for node in entry.whole if node not in leaving]
        sources = sorted(
            islice(staying or entry.whole, SOURCES_NAMED_MAX),
            key=lambda node: (self._busy.get(node, 0.0), node),
        )
        best = self._plan_cache.spread(entry.nbytes, sources[0], living, leaving)
        stripes, shape = best.stripes, best.shape
        kept = None
        if before is not None and before.rule == "stripes" and len(before.receivers) > 1:
            kept = kept_cut(before.stripes, {*living, *entry.whole} - leaving, stripes)
        if kept is not None:  # the earlier stripes remain, so that arrived bytes stay usable
            stripes, shape = kept, "stripes"
        else:
            self.notes.append(best.why)
        plan = Distribute(
            entry.operation,
            entry.object,
            self._next_epoch(),
            entry.nbytes,
            tuple(sources),
            tuple(living),
            stripes,
            shape,
        )
        seconds, estimates, why = best.seconds, best.estimates, ""
        if stripes is kept:
            estimates, why = (), "planned again: the stripes of bytes that have arrived are kept"
        elif shape == "stripes":
            plan, seconds, narrow = self.trees.used_by(plan, seconds, now, self.notes)
            if narrow is not None:  # the earlier estimates ignore narrow paths
                estimates = (("stripes", len(stripes), narrow.stripes_s),)
                if plan.rule == "parents":
                    estimates += (("packed trees", len(set(plan.parents)), seconds),)
                why = narrow.words
        record = PlanRecord(plan, now, seconds, estimates, best.rates, why=why)
        self._start(entry, plan, now, seconds, record)
        return [(node, plan) for node in participants(plan)]

    def _single(
        self, entry: DirectoryEntry, receiver: int, now: float, *, waited_for: bool = True
    ) -> list[Send]:
        """Makes a plan for one receiver, with the parents that have the most spare rate.
        `waited_for`: whether other nodes may be waiting for the receiver. Such nodes cannot be its
        parents."""
        if not self._membership.is_living(receiver):
            return []
        below = self._below(entry, receiver) if waited_for else set()
        ranked = self._candidates(entry, receiver, below, now)
        if not ranked or not entry.whole:
            return self._refuse(entry, [receiver], now)
        wanted = self._speeds.hosts((receiver,))[0].down
        parents: list[tuple[int, float]] = []
        used = seconds = 0.0
        spare = sum(offered for slows, _, _, offered in ranked[:PARENTS_MAX] if not slows)
        # All parents with a spare rate may together offer less than one parent that slows down its
        # other receivers. In that case the latter is used.
        ranked.sort(key=lambda candidate: not (candidate[0] and candidate[3] > spare))
        for slows, ready_in, node, offered in ranked[:PARENTS_MAX]:
            if parents and (used > (1 - UNUSED_MAX) * wanted or slows):
                break
            if parents and ready_in > entry.nbytes / min(used, wanted):
                continue  # the copy is complete earlier without this parent
            parents.append((node, offered))
            used += offered
            seconds = max(seconds, ready_in)
        seconds = max(seconds, entry.nbytes / min(used, wanted))
        seconds += max(self._speeds.pair_latency_s(node, receiver) for node, _ in parents)
        stripes = self._cut_late(entry, parents)
        plan = Distribute(
            entry.operation,
            entry.object,
            self._next_epoch(),
            entry.nbytes,
            tuple(node for node, _ in parents if node in entry.whole),
            (receiver,),
            stripes,
            "stripes",
        )
        self._start(entry, plan, now, seconds, self._record_single(plan, now, seconds, ranked))
        return [(node, plan) for node in participants(plan)]

    def _record_single(
        self,
        plan: Distribute,
        now: float,
        seconds: float,
        ranked: list[tuple[bool, float, int, float]],
    ) -> PlanRecord:
        """Returns the record of a plan for a single receiver. `ranked`: see `_candidates`."""
        owners = dict.fromkeys(stripe.owner for stripe in plan.stripes)
        nodes = (*owners, *plan.receivers)
        record = PlanRecord(
            plan, now, seconds, rates=self._speeds.described(nodes), candidates=ranked
        )
        narrow = self._speeds.pair_rates(nodes, now)
        used = {pair: rate for pair, rate in narrow.items() if pair[1] in plan.receivers}
        if used:
            record.why = NarrowPaths(used, seconds).words
        return record

    def _candidates(
        self, entry: DirectoryEntry, receiver: int, below: set[int], now: float
    ) -> list[tuple[bool, float, int, float]]:
        """Returns, for each possible parent, (whether it would slow down its other receivers,
        seconds until its own copy is complete, node, bytes per second offered), best first. Nodes
        with a spare rate precede nodes that would slow down other receivers. Within both groups,
        nodes are sorted by the time that each would need to send the whole object. Equal nodes are
        used in turn, both for one object and from object to object."""
        nodes = [
            *islice(reversed(entry.whole), CANDIDATES_MAX),
            *islice(reversed(entry.receiving), CANDIDATES_MAX),
        ]
        able = [
            node
            for node in nodes
            if node != receiver and node not in below and (receiver, node) not in entry.failed
        ]
        staying = [node for node in able if node not in self._membership.leaving]
        able = sorted(staying or able)
        down = self._speeds.hosts((receiver,))[0].down
        narrow = self._speeds.pair_rates((*able, receiver), now)
        ranked = []
        for at, (node, host) in enumerate(zip(able, self._speeds.hosts(able), strict=True)):
            slows, offered = self._offer(node, host)
            offered = min(down, offered, narrow.get((node, receiver), down))
            ready_in = 0.0
            if node in entry.receiving:
                ready_in = max(0.0, entry.transfers[entry.receiving[node]].ends_at - now)
            seconds = max(ready_in, entry.nbytes / offered)
            seconds += self._speeds.pair_latency_s(node, receiver)
            turn = entry.served.get(node, 0), (at + entry.operation) % len(able)
            ranked.append((slows, seconds, turn, ready_in, node, offered))
        return [
            (slows, ready_in, node, offered)
            for slows, _, _, ready_in, node, offered in sorted(ranked)
        ]

    def _offer(self, node: int, host: HostRates) -> tuple[bool, float]:
        """Returns the rate at which a node can serve a new receiver, as (whether this slows down
        its other receivers, bytes per second). The rate is the node's spare up rate or, if little
        is spare, a fair share of its total rate."""
        busy = self._busy.get(node, 0.0)
        spare = host.up - busy
        if spare >= SPARE_MIN * host.up:
            return False, spare
        return True, host.up * host.up / (host.up + busy)

    def _below(self, entry: DirectoryEntry, receiver: int) -> set[int]:
        """All nodes that wait for this receiver, directly or through other nodes."""
        children: dict[int, set[int]] = {}
        for transfer in entry.transfers.values():
            for sender in transfer.rates:
                if sender not in entry.whole:
                    children.setdefault(sender, set()).update(transfer.waiting)
        below: set[int] = set()
        found = [receiver]
        while found:
            new = children.get(found.pop(), set()) - below
            below |= new
            found += new
        return below

    def _cut_late(
        self, entry: DirectoryEntry, parents: Sequence[tuple[int, float]]
    ) -> tuple[Stripe, ...]:
        """Returns the stripes for a single. If a parent is still receiving the object, stripes also
        end where the stripes of that parent end. Each stripe is then a range of a single cell of
        its parent, and advances with that cell."""
        cuts = tree_shapes.cut(parents)
        edges: set[int] = set()
        for node, _ in parents:
            if node in entry.receiving:
                plan = entry.transfers[entry.receiving[node]].plan
                edges.update(stripe.end_share for stripe in plan.stripes)
        if not edges:
            return cuts
        stripes: list[Stripe] = []
        for stripe in cuts:
            begin = stripe.begin_share
            inside = sorted(e for e in edges if begin < e < stripe.end_share)
            for end in (*inside, stripe.end_share):
                stripes.append(Stripe(stripe.owner, begin, end))
                begin = end
        return tuple(stripes)

    # ---- bookkeeping

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _start(
        self,
        entry: DirectoryEntry,
        plan: Distribute,
        now: float,
        seconds: float,
        record: PlanRecord | None = None,
    ) -> None:
        if record is not None:
            self._log.add((entry.object,), record)
        if plan.rule == "stripes":
            shares = shares_sent(plan)
        else:
            shares = dict.fromkeys((plan.sources[0], *plan.receivers), SHARES)
        scale = entry.nbytes / SHARES / max(seconds, 1e-9)
        rates = {node: share * scale for node, share in shares.items()}
        busy, served = self._busy, entry.served
        for node, rate in rates.items():
            busy[node] = busy.get(node, 0.0) + rate
            served[node] = served.get(node, 0) + 1
        self._directory.name(entry, (*participants(plan), *rates))
        waiting = dict.fromkeys(plan.receivers)
        entry.transfers[plan.epoch] = Transfer(plan, waiting, rates, now + seconds, record)
        entry.receiving.update(dict.fromkeys(plan.receivers, plan.epoch))

    def _arrived(self, entry: DirectoryEntry, epoch: int, node: int) -> list[Send]:
        """Removes a receiver that has the complete object. Withdraws the plan after the last
        receiver."""
        transfer = entry.transfers[epoch]
        del transfer.waiting[node]
        if transfer.waiting:
            return []
        sends = self._withdraw(entry, epoch)
        self._directory.forget_if_over(entry)
        return sends

    def _withdraw(self, entry: DirectoryEntry, epoch: int) -> list[Send]:
        transfer = entry.transfers.pop(epoch)
        if transfer.waiting and transfer.record is not None:
            transfer.record.state = "replaced"
        for node, rate in transfer.rates.items():
            left = self._busy.get(node, 0.0) - rate
            if left > 1.0:
                self._busy[node] = left
            else:  # the remainder is a rounding error
                self._busy.pop(node, None)
        message = Withdraw(entry.operation, entry.object, epoch)
        living = self._membership.is_living
        return [(node, message) for node in participants(transfer.plan) if living(node)]

    def _refuse(self, entry: DirectoryEntry, receivers: list[int], now: float) -> list[Send]:
        """Refuses the object to these receivers. Nodes that wait for them get new parents, or are
        also refused."""
        why = "no living node has a complete copy"
        if entry.whole:
            why = "no holder can be reached from this node"
        message = FetchRefused(entry.object, "lost", why)
        if entry.full and not entry.whole:
            message = FetchRefused(entry.object, "full", entry.full)
        for node in receivers:
            entry.receiving.pop(node, None)
        sends: list[Send] = [(node, message) for node in receivers]
        refused = set(receivers)
        hit = [e for e, t in entry.transfers.items() if not refused.isdisjoint(t.rates)]
        again = [list(entry.transfers[epoch].waiting) for epoch in hit]
        return sends + self._replace(entry, hit, again, now) if hit else sends
