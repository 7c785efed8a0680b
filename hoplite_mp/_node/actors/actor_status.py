"""Descriptions of this host's actors for users: their state, and the calls that wait for them.

`status`, `top` and `dump` show actors, and a trace has a track for each. This file only collects
their data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._node.actors.actor_records import ended_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._node.actors.actor_records import ActorRecord
    from hoplite_mp._node.actors.actors import LocalActors
    from hoplite_mp._node.actors.remote_actors import RemoteActors

__all__ = ["actors_here", "calls_from_here", "track_name"]


def actors_here(actors: LocalActors) -> Iterator[dict[str, Any]]:
    """Describes each actor of this host, with the number of waiting, running and finished calls
    that this host knows of."""
    waiting = actors.client.queued_counts()
    for actor in list(actors.by_identity.values()):
        pool = actors.workers.pools.get(actor.pool)
        running, done, pids = 0, actor.calls_done, []
        for slot, worker in pool.workers.items() if pool is not None else ():
            running += bool(actors.tasks.running(slot))
            done += ended_calls(actors.client, slot)
            pids.append(worker.pid)
        yield {
            "identity": actors.public(actor.identity).hex(),
            "name": actor.label,
            "class": actor.class_name,
            "pids": pids,
            "state": _state(actor),
            "waiting": waiting.get(actor.pool, 0),
            "running": running,
            "done": done,
            "restarts": actor.restarts,
            "restarts_left": actor.restarts_left,
        }


def _state(actor: ActorRecord) -> str:
    if actor.ended is not None:
        return "ended"
    return "lives" if actor.begun else "begins"


def calls_from_here(far: RemoteActors) -> Iterator[dict[str, Any]]:
    """Describes the calls of this host's processes that wait here for actors of other hosts."""
    waiting = far.client.queued_counts()
    for pool, bound in list(far.bound.items()):
        if waiting.get(pool):
            found = pool in far.outbound_tasks.far
            peer = far.roster.number_of(bound.host_id) if found else None
            yield {
                "identity": far.actors.public(bound.identity).hex(),
                "waiting": waiting[pool],
                "at": "" if peer is None else f"h{peer}",
            }


def track_name(actor: ActorRecord) -> str:
    """The name of the actor's track in a trace."""
    return (
        f"actor {actor.label} ({actor.class_name})"
        if actor.label
        else (f"actor {actor.class_name}, pool {actor.pool}")
    )
