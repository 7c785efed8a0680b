"""The good end of a collective that this host has asked for: where its results are, who must know.

Why it exists: results lie here, as blocks, or at other nodes, where they are kept for those who
will read them; the home of each object hears of its copies at once.
It must never know: plans, cells, how bytes came there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.node.collectives.stripe_layout import result_head
from hoplite_mp.protocol.peers import Kept

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp.node.collectives.plan_executor import PlanExecutor
    from hoplite_mp.protocol.local import Collective
    from hoplite_mp.protocol.messages import Commit

__all__ = ["finish", "placed"]


def finish(
    plan_executor: PlanExecutor,
    ask: Collective,
    layout: bytes,
    blocks: dict[int, tuple[int, int]],
    message: Commit,
) -> None:
    """A fold: `blocks` are the results that are here, by index: (payload, bytes)."""
    for index, oid in enumerate(ask.results):
        if index in blocks:
            plan_executor.results.store_block(oid, *blocks[index])
            if ask.kind != "reduce_scatter":  # there each has one of its own
                _say_kept(plan_executor, plan_executor.imports.public(oid), message.destinations)
            continue
        holders = message.destinations
        if ask.kind == "reduce_scatter":
            holders = (holders[index],)
        _, own, nbytes = result_head(ask.op, layout, len(ask.results), index, message.contributors)
        plan_executor.remote_objects.complete(
            oid, plan_executor.imports.public(oid), nbytes, holders, own
        )


def placed(plan_executor: PlanExecutor, ask: Collective, message: Commit) -> None:
    """Copies are made: their homes know it from now on."""
    others = [node for node in message.destinations if node in plan_executor.links.peers.by_number]
    if not others:
        return
    for index in message.contributors:
        at = others
        if ask.kind == "alltoall":
            place = message.destinations[index % len(message.destinations)]
            at = [place] if place in others else []
        _say_kept(plan_executor, plan_executor.imports.public(ask.sources[index]), at)


def _say_kept(plan_executor: PlanExecutor, object_id: bytes, nodes: Iterable[int]) -> None:
    """These nodes, of which this one may be one, keep a copy."""
    peers = plan_executor.links.peers.by_number
    hosts = tuple(peers[node].member.home for node in nodes if node in peers)
    if hosts:
        plan_executor.replicas.say(Kept(object_id, 0, hosts))
