"""Explains how an object or the result of a collective moved between hosts: `Cluster.explain`.

The planner keeps records of its latest plans. This module requests the records of one object
through the node of this host, and converts them into the objects of the public API.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp._api.nodes import node_id
from hoplite_mp._api.pytree import as_ref
from hoplite_mp._client.thread_futures import ThreadFuture
from hoplite_mp._common.machine_limits import format_bytes, format_seconds, three_digits
from hoplite_mp._common.object_states import CANCELLED, PENDING, STATE, VALUED
from hoplite_mp._protocol.fields import FOLDING, INLINE_BYTES_MAX, SHARES
from hoplite_mp._protocol.local import Explain, Locate
from hoplite_mp._protocol.plans import PlanSummary
from hoplite_mp.config import PLAN_RECORDS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._client.runtime import Runtime

__all__ = ["Explanation", "TransferPlan", "explain"]

NAMED_MAX = 8  # maximum number of items that a line of text lists; the others are only counted


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPlan:
    """How the planner has moved, or is moving, an object between hosts; part of an `Explanation`.

    Attributes
    ----------
    kind : str
        "copy" for a transfer that the receiver has requested, for example with `get` or for a
        task's argument; otherwise "broadcast", "reduce", "allreduce", "reduce_scatter", "gather",
        "allgather" or "alltoall".
    shape : str
        "direct copy", "chain", "stripes", "one owner", "tree of degree 2", "packed trees", "direct
        copies", or "one node"; "" if there is no plan yet.
    state : str
        "waiting" (for sources), "running", "done", "failed", or "replaced" (a later plan took
        over, or the object was no longer needed).
    nbytes : int
        Bytes of the object, or of the largest source; 0 if unknown.
    sources, receivers : tuple of str
        Ids of the nodes that send and receive the bytes; at most 64 of each.
    shares : dict
        For each node that forwards, folds or sends some of the bytes: the share of the bytes, at
        most 1.
    estimates : tuple of (str, int, float)
        (shape, number of owners or trees, seconds) of the alternatives that the planner compared,
        the fastest first.
    rates : dict
        (up, down) in bytes per second for each node, as known when the plan was made.
    assumed : tuple of str
        Nodes whose rates had not been measured yet.
    expected_s : float or None
        The planner's estimate in seconds; None if it made none.
    elapsed_s : float or None
        Seconds from the plan to the last node's report that it is done; None until then.
    last : str
        The node that reported last; "" until then, and for collectives.
    why : str
        Further reasons for the plan, such as narrow paths or a lost host; or why the plan failed.

    Examples
    --------
    >>> total = c.reduce([c.put(np.ones(4)), c.put(np.ones(4))])
    >>> c.wait(total)[1]
    []
    >>> (plan,) = c.explain(total).plans
    >>> plan.kind, plan.shape, plan.sources, plan.receivers
    ('reduce', 'one node', ('h0',), ('h0',))
    """

    __module__ = "hoplite_mp"  # as users import it

    kind: str
    shape: str
    state: str
    nbytes: int
    sources: tuple[str, ...]
    receivers: tuple[str, ...]
    shares: dict[str, float]
    estimates: tuple[tuple[str, int, float], ...]
    rates: dict[str, tuple[float, float]]
    assumed: tuple[str, ...]
    expected_s: float | None
    elapsed_s: float | None
    last: str
    why: str

    def __str__(self) -> str:
        """The plan as several lines of text."""
        size = f" of {format_bytes(self.nbytes)}" if self.nbytes else ""
        ends = [
            f" {word} {_names(nodes)}"
            for word, nodes in (("from", self.sources), ("to", self.receivers))
            if nodes
        ]
        lines = [f"{self.kind}{size}{''.join(ends)}: {self.shape or 'no plan yet'}, {self.state}"]
        times = []
        if self.expected_s is not None:
            times.append(f"expected {format_seconds(self.expected_s)}")
        if self.elapsed_s is not None:
            last = f", {self.last} last" if self.last and len(self.receivers) > 1 else ""
            times.append(f"took {format_seconds(self.elapsed_s)}{last}")
        if times:
            lines.append(f"  {'; '.join(times)}")
        if len(self.shares) > 1:
            parts = [f"{node} {share:.0%}" for node, share in self.shares.items()]
            lines.append(f"  shares: {_some(parts)}")
        texts = [
            f"{shape}{f' ({count})' if count > 1 else ''} {format_seconds(seconds)}"
            for shape, count, seconds in self.estimates
        ]
        compared = list(dict.fromkeys(texts))  # plans with other owners may look the same
        if len(compared) > 1:
            lines.append(f"  compared: {_some(compared)}")
        if self.rates:
            rates = [
                f"{node} {_rate(up)}/{_rate(down)}{' (assumed)' if node in self.assumed else ''}"
                for node, (up, down) in self.rates.items()
            ]
            lines.append(f"  MB/s up/down: {_some(rates)}")
        if self.why:
            lines.append(f"  {self.why}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """How an object reached the hosts that hold it: the result of `Cluster.explain`.

    Attributes
    ----------
    state : str
        "pending", "ready", "failed", "cancelled", "deleted" or "gone".
    nbytes : int
        Bytes of the value; 0 if it is not ready.
    locations : tuple of str
        Ids of the nodes that hold the value.
    plans : tuple of TransferPlan
        The recorded plans, from the earliest to the latest.
    why : str
        The reason why there is no plan; "" if there is one.

    Examples
    --------
    >>> print(c.explain(c.put(np.zeros(1 << 20))))
    ready, 8.0 MiB on h0
    no transfer: processes of h0 read it in shared memory
    """

    __module__ = "hoplite_mp"  # as users import it

    state: str
    nbytes: int
    locations: tuple[str, ...]
    plans: tuple[TransferPlan, ...]
    why: str

    def __str__(self) -> str:
        """The explanation as several lines of text."""
        at = f" on {_names(self.locations)}" if self.locations else ""
        size = f", {format_bytes(self.nbytes)}" if self.nbytes else ""
        lines = [f"{self.state}{size}{at}", *map(str, self.plans)]
        return "\n".join([*lines, self.why] if self.why else lines)


def explain(runtime: Runtime, ref: Any) -> Explanation:
    """Implements `Cluster.explain`."""
    if isinstance(ref, ThreadFuture):
        raise TypeError(
            "the Future of a Group call has no recorded plan: the hosts of a Group plan its calls "
            "among themselves; c.trace(path) shows them"
        )
    memory = runtime.memory
    memory.check()
    runtime.submitter.drain()
    oid = memory.local_id(as_ref(ref))
    client = memory.client
    state = client.state(oid)
    valued = state in VALUED
    nbytes = client.inspect(oid)["size"] if valued else 0
    numbers = runtime.channel.call(Locate(oid)).value if valued else []
    locations = tuple(map(node_id, numbers))
    found = runtime.channel.call(Explain(oid)).value
    summaries = msgspec.convert(found or [], list[PlanSummary])
    plans = tuple(_plan(one, nbytes) for one in summaries)
    own = node_id(runtime.tasks.node_number)
    why = ""
    if found is None:
        why = "the manager did not answer in time, so its plans are not known"
    elif not plans:
        why = _no_plan(_STATE_WORDS.get(state, "ready"), nbytes, locations, own)
    return Explanation(_STATE_WORDS.get(state, "ready"), nbytes, locations, plans, why)


_STATE_WORDS = {
    **dict.fromkeys(PENDING, "pending"),
    **dict.fromkeys(CANCELLED, "cancelled"),
    STATE["FAILED"]: "failed",
    STATE["DELETED"]: "deleted",
    STATE["FREE"]: "gone",
    STATE["FREED"]: "gone",
}


def _no_plan(state: str, nbytes: int, locations: tuple[str, ...], own: str) -> str:
    """Why the planner has no record of an object."""
    if state == "pending":
        return "no transfer: there is no value yet, and no plan to move it"
    if state != "ready":
        return "no transfer: there is no value"
    limit = format_bytes(INLINE_BYTES_MAX)
    inline = f"no plan: values up to {limit} are sent to other hosts in messages"
    shared = f"processes of {own} read it in shared memory"
    if locations == (own,):
        return f"{inline}; {shared}" if nbytes <= INLINE_BYTES_MAX else f"no transfer: {shared}"
    if nbytes <= INLINE_BYTES_MAX:
        return inline
    if own not in locations:
        return f"no transfer: {own} has not requested it yet"
    return f"no plan is recorded; the manager keeps plans of the last {PLAN_RECORDS_MAX} objects"


def _plan(summary: PlanSummary, nbytes: int) -> TransferPlan:
    ended = summary.state in ("done", "failed")
    size = summary.nbytes
    if not size and summary.kind in FOLDING:  # the planner of a single host receives no sizes
        size = nbytes
    return TransferPlan(
        kind=summary.kind,
        shape=summary.shape,
        state=summary.state,
        nbytes=size,
        sources=tuple(map(node_id, summary.sources)),
        receivers=tuple(map(node_id, summary.receivers)),
        shares={node_id(node): shares / SHARES for node, shares in summary.owners},
        estimates=summary.estimates,
        rates={node_id(node): (up, down) for node, up, down, _ in summary.rates},
        assumed=tuple(node_id(node) for node, _, _, measured in summary.rates if not measured),
        expected_s=summary.expected_s,
        elapsed_s=summary.last_s if ended else None,
        last=node_id(summary.last_node) if summary.finished else "",
        why=summary.why,
    )


def _rate(rate: float) -> str:
    return three_digits(rate / 1e6)


def _names(nodes: Iterable[str]) -> str:
    return _some(list(nodes))


def _some(words: list[str]) -> str:
    more = len(words) - NAMED_MAX
    return ", ".join(words[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
