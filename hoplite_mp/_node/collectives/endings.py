"""Ends a committed collective that this host requested: records where results are, informs owners.

The results are blocks in this host's store, or replicas that other nodes keep for later readers.
The owner of each object is told at once which nodes have replicas of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._node.execution.stripe_layout import result_head
from hoplite_mp._protocol.peers import ReplicaStored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._protocol.local import Collective
    from hoplite_mp._protocol.messages import Commit

__all__ = ["finish", "placed"]


def finish(
    plan_executor: PlanRunner,
    ask: Collective,
    layout: bytes,
    blocks: dict[int, tuple[int, int]],
    message: Commit,
) -> None:
    """Completes the results of a fold. `blocks` has those that are on this host: index -> (payload,
    bytes)."""
    for index, oid in enumerate(ask.results):
        if index in blocks:
            plan_executor.results.store_block(oid, *blocks[index])
            # Each destination of a reduce_scatter has only its own result.
            if ask.kind != "reduce_scatter":
                _say_kept(plan_executor, plan_executor.imports.public(oid), message.destinations)
            continue
        holders = message.destinations
        if ask.kind == "reduce_scatter":
            holders = (holders[index],)
        _, own, nbytes = result_head(ask.op, layout, len(ask.results), index, message.contributors)
        plan_executor.remote_objects.complete(
            oid, plan_executor.imports.public(oid), nbytes, holders, own
        )


def placed(plan_executor: PlanRunner, ask: Collective, message: Commit) -> None:
    """After a collective that only copied: tells the owners of the sources which nodes have
    replicas."""
    peers = plan_executor.links.peers.by_number
    others = dict.fromkeys(node for node in message.destinations if node in peers)
    if not others:
        return
    for index in message.contributors:
        at = [*others]
        if ask.kind == "alltoall":
            place = message.destinations[index % len(message.destinations)]
            at = [place] if place in others else []
        _say_kept(plan_executor, plan_executor.imports.public(ask.sources[index]), at)


def _say_kept(plan_executor: PlanRunner, object_id: bytes, nodes: Iterable[int]) -> None:
    """Tells the object's owner that these nodes, except for this one, keep a replica."""
    peers = plan_executor.links.peers.by_number
    hosts = tuple(peers[node].member.host_id for node in nodes if node in peers)
    if hosts:
        plan_executor.replicas.say(ReplicaStored(object_id, 0, hosts))
