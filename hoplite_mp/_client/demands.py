"""Places workers, actors and tasks on the nodes that have their resources.

If no node can ever meet a demand (the resources that a task, worker or actor needs), the call
raises an error. This host's node is asked for the resources of all nodes, and its reply is cached
until the cluster's nodes change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._client.calls import current_call
from hoplite_mp._client.option_checks import checked_priority
from hoplite_mp._planner.resources import Demand, amounts_of, demand_words
from hoplite_mp._protocol.resources import AssignedResources, ResourcePlaces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._client.ports import MembershipPort

__all__ = ["WORKERS_MAX", "Demands", "check_demands", "refusal", "refuse_demands", "spread"]


KNOWN_MAX = 256  # maximum number of different demands that are cached


def check_demands(changes: dict[str, Any]) -> None:
    """Checks the options priority= and resources=, and converts their values to an integer and to
    amounts in resource units. Raises ValueError or TypeError."""
    if "priority" in changes:
        changes["priority"] = checked_priority(changes["priority"])
    if changes.get("resources") is not None:
        changes["resources"] = amounts_of(changes["resources"]) or None


def refuse_demands(changes: dict[str, Any]) -> None:
    """Refuses resources= for a view of an executor."""
    if changes.get("resources") is not None:
        raise ValueError(
            "resources= of an executor belong to its workers as long as they exist: set them when "
            "creating the executor, with c.options(resources=...).executor(n)"
        )


class Demands:
    """The cluster's resources, as known to one process."""

    def __init__(self, runtime: MembershipPort) -> None:
        self._runtime = runtime
        self._known: dict[Demand, list[tuple[int, int, int, int]]] = {}
        self._version = -1

    def _places(self, demand: Demand) -> list[tuple[int, int, int, int]]:
        """For each node: (node, workers, how many such demands the node can meet in total, how many
        it can meet now). This host is first; the others are in the order in which they joined."""
        self._runtime.memory.check()
        found = [tuple(one) for one in self._runtime.channel.call(ResourcePlaces(demand)).value]
        own = self._runtime.tasks.node_number
        found.sort(key=lambda place: place[0] != own)
        return found

    def common_workers(self) -> int:
        """The number of workers in the common pool, over all nodes."""
        return sum(workers for _, workers, *_ in self._places(()))

    def nodes_for_task(self, demand: Demand, nodes: Sequence[int] | None) -> Sequence[int] | None:
        """The nodes among `nodes` on which a task with that demand can run. If `nodes` is None,
        returns None if any node can run the task. Raises ValueError if no node can run it."""
        version = self._runtime.submitter.queues.ranked.resources_version
        if version != self._version or len(self._known) > KNOWN_MAX:
            self._known, self._version = {}, version
        known = self._known.get(demand)
        if known is None:
            known = self._known[demand] = self._places(demand)
        able = [
            number
            for number, workers, fits, _ in known
            if fits and workers and (nodes is None or number in nodes)
        ]
        if not able:
            idle = [number for number, workers, fits, _ in known if fits and not workers]
            self._refuse(demand, nodes, idle)
        return None if nodes is None else able

    def _refuse(
        self, demand: Demand, nodes: Sequence[int] | None, idle: Sequence[int] = ()
    ) -> None:
        where = "no node of this cluster"
        if nodes is not None:
            where = f"none of the nodes {', '.join(f'h{number}' for number in nodes)}"
        why = ""
        if idle:
            names = ", ".join(f"h{number}" for number in idle)
            why = f" and workers in the common pool (without workers: {names})"
        raise ValueError(
            f"{where} has {demand_words(demand)}{why}: declare a host's resources with "
            "Cluster(resources=), or with --resources of `hoplite-mp up` and `join`"
        )

    def places_for_workers(
        self, demand: Demand, count: int, numbers: Sequence[int]
    ) -> list[tuple[int, int]]:
        """[(node, number of workers)] for `count` processes that each have that demand. The
        processes are spread over the nodes in `numbers`. If `numbers` is empty, each node runs as
        many as fit, beginning with this host. Raises ValueError if not all processes fit."""
        fits = {number: times for number, _, times, _ in self._places(demand)}
        able = [one for one in numbers or fits if fits.get(one)]
        if not able:
            self._refuse(demand, numbers or None)
        room = sum(fits[one] for one in able)
        if room < count:
            raise ValueError(
                f"{count} processes with {demand_words(demand)} each: there is enough for {room}"
                + (" on the given nodes" if numbers else "")
            )
        if numbers:
            return spread(count, [(one, 1) for one in able], fits)
        places = []
        for one in able:
            here = min(count, fits[one])
            count -= here
            places.append((one, here))
        return [place for place in places if place[1]]

    def most_workers(self, demand: Demand, count: int, numbers: Sequence[int]) -> int:
        """The number of workers that fit, at least one and at most `count`."""
        fits = [
            times for number, _, times, _ in self._places(demand) if number in (numbers or [number])
        ]
        return max(1, min(count, sum(fits)))

    def places_for_actor(self, demand: Demand, nodes: Sequence[int], turn: int) -> list[int]:
        """Candidate nodes for an actor: first the nodes that can meet the demand now, then other
        nodes that have the resources. If `nodes` is not empty, only these nodes are candidates, and
        both lists are rotated by `turn`. Raises ValueError if no node has the resources."""
        known = [
            (number, now)
            for number, _, times, now in self._places(demand)
            if times and (not nodes or number in nodes)
        ]
        if not known:
            self._refuse(demand, nodes or None)
        able = [number for number, now in known if now]
        others = [number for number, now in known if not now]
        return _turned(able, turn) + _turned(others, turn) if nodes else able + others

    def assigned(self) -> dict[str, list[int]]:
        """The indices of the resources that are assigned to the running task, or to this process as
        long as it runs."""
        call = current_call.get()
        oid = self._runtime.running if call is None else call.oid
        found = self._runtime.channel.call(AssignedResources(oid)).value
        return {name: list(indices) for name, indices in found.items()}


def _turned(numbers: list[int], turn: int) -> list[int]:
    """The list, rotated so that the number at index `turn` (modulo its length) is first."""
    first = turn % len(numbers) if numbers else 0
    return numbers[first:] + numbers[:first]


WORKERS_MAX = 200


def refusal(max_workers: Any) -> str:
    """The error text for an invalid number of workers. It begins like the standard library's."""
    return (
        f"max_workers must be greater than 0 and at most {WORKERS_MAX}, or None, "
        f"not {max_workers!r}"
    )


def spread(
    count: int, places: Sequence[tuple[int, int]], most: dict[int, int] | None = None
) -> list[tuple[int, int]]:
    """Distributes `count` workers over (node, weight). Returns [(node, workers)] without zeros.
    Each worker is placed on the node that then has the fewest workers in proportion to its weight;
    the first such node wins. `most`: the maximum number of workers on each node."""
    given = dict.fromkeys((number for number, _ in places), 0)
    for _ in range(count):
        open_ = [one for one in places if most is None or given[one[0]] < most[one[0]]]
        number, _ = min(open_, key=lambda place: (given[place[0]] + 1) / place[1])
        given[number] += 1
    return [(number, workers) for number, workers in given.items() if workers]
