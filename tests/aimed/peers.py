"""Peers of `spmd`, which wait for one another, when their hosts are lost or leave."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hoplite_mp._protocol.peer_hosts import OpenRemotePool
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp._simulation.workloads.remote import RESOURCE
from tests.aimed.aim import Aim, with_resource

__all__ = [
    "peers_elsewhere",
    "peers_here",
    "peers_in_turn",
    "peers_made_again",
    "peers_of_a_leaver",
    "peers_refused",
    "peers_with_resources",
    "peers_without_a_place",
]

begun: list[int] = []  # ranks of peers, in the order in which they have begun


def meets(rank: int, lives: int) -> int:
    """A peer that goes on when so many peers have begun, those that have begun again counted."""
    begun.append(rank)
    until = time.monotonic() + HANGS_S
    while len(begun) < lives:
        if time.monotonic() > until:
            raise WrongEnd(f"peers wait for one that does not begin again; begun are {begun}")
        time.sleep(0.02)
    return rank


def all_begin(a: Aim, size: int) -> None:
    """Waits until so many peers have begun."""
    if not a.wait_for(HANGS_S, lambda: len(begun) == size):
        raise WrongEnd("peers do not begin")


def _peers_again(
    a: Aim, with_own: bool, deaths: int, first: str = "dies", second: str = "dies"
) -> None:
    """first: what becomes of one peer's host: "dies", or "leaves" and then dies. second, if not
    only one dies: what becomes of the host that is asked to take that peer, while it is asked."""
    begun.clear()
    places = a.some(3)
    A = places[0] if with_own else next(h for h in a.hosts if h.place and h not in places)
    others = [h for h in places if h is not A]
    size = 3
    leaves = (first == "leaves") + (second == "leaves")
    a.must(die=deaths, leave=leaves)

    def send(c: Any) -> None:
        lives = size + deaths
        peers = c.options(node=[f"h{h.number}" for h in places]).spmd(meets, size, lives)
        all_begin(a, size)
        asked: list[Any] = []

        def strike(sender: int, receiver: int) -> None:
            asked.extend(h for h in others if h.place == receiver)
            a.late(0.0, a.die if second == "dies" else a.leave, asked[0])

        if second == "leaves" or deaths > 1:
            a.message_fault(OpenRemotePool, strike, arrives=second == "dies")
        if first == "leaves":
            a.leave(others[0])
            time.sleep(1.0)
        a.die(others[0])
        if [one.result(timeout=2 * HANGS_S) for one in peers] != list(range(size)):
            raise WrongEnd("peers return something else")

    a.run(A, "send", send)


def peers_elsewhere(a: Aim) -> None:
    """Peers of `spmd` wait for one another. The host of one is lost, and so is that on which it was
    to begin again: both begin again on the last one, while that one's own peer waits."""
    _peers_again(a, False, 2)


def peers_here(a: Aim) -> None:
    """Likewise on the host that has started them, or on another one that is left."""
    _peers_again(a, True, 1)


def peers_of_a_leaver(a: Aim) -> None:
    """The host of one leaves, which waits for its peer, and is lost meanwhile."""
    _peers_again(a, a.rng.random() < 0.5, 1, first="leaves")


def peers_refused(a: Aim) -> None:
    """The host of one is lost, and that which is asked to take its peer is about to leave."""
    _peers_again(a, False, 1, second="leaves")


def peers_with_resources(a: Aim) -> None:
    """Each has resources for life. The host of one is lost, and another one has free what it needs
    besides its own peer's."""
    begun.clear()
    places = with_resource(a)
    A = next(h for h in a.hosts if h not in places)
    size = len(places)
    a.must(die=1)

    def send(c: Any) -> None:
        view = c.options(resources={RESOURCE: 1}, node=[f"h{h.number}" for h in places])
        peers = view.spmd(meets, size, size + 1)
        all_begin(a, size)
        a.die(a.rng.choice(places))
        if [one.result(timeout=2 * HANGS_S) for one in peers] != list(range(size)):
            raise WrongEnd("peers return something else")

    a.run(A, "send", send)


def rests(rank: int, seconds: float) -> int:
    """A peer that waits for nobody."""
    begun.append(rank)
    time.sleep(seconds)
    return rank


def peers_in_turn(a: Aim) -> None:
    """The host of one is lost, and the other host has all that it has in use: the lost one begins
    again when the other one has ended."""
    begun.clear()
    places = with_resource(a)
    A = next(h for h in a.hosts if h not in places)
    size = len(places)
    a.must(die=1)

    def send(c: Any) -> None:
        view = c.options(resources={RESOURCE: 2}, node=[f"h{h.number}" for h in places])
        peers = view.spmd(rests, size, 2.0)
        all_begin(a, size)
        a.die(a.rng.choice(places))
        if [one.result(timeout=HANGS_S) for one in peers] != list(range(size)):
            raise WrongEnd("peers return something else")

    a.run(A, "send", send)


def peers_without_a_place(a: Aim) -> None:
    """No host is named. All peers are on one host, which is lost, and begin again on the other one
    that has what they need."""
    begun.clear()
    places = with_resource(a)
    A = next(h for h in a.hosts if h not in places)
    a.must(die=1)

    def send(c: Any) -> None:
        peers = c.options(resources={RESOURCE: 1}).spmd(meets, 2, 4)
        all_begin(a, 2)
        used = [h for h in places if h.node.components.resources.slots]
        if len(used) != 1:
            raise WrongEnd(f"they are on hosts {used}")
        a.die(used[0])
        if [one.result(timeout=2 * HANGS_S) for one in peers] != [0, 1]:
            raise WrongEnd("peers return something else")

    a.run(A, "send", send)


def large_peer(rank: int, rests_s: float) -> Any:
    """Rank 0 ends at once with a large result; the other one waits."""
    begun.append(rank)
    time.sleep(rests_s if rank else 0.0)
    return np.full(20_000, rank)


def peers_made_again(a: Aim) -> None:
    """A peer has ended with a result that only its host has, which is lost. The result is made
    again in a process of its own, and not when the other peer has ended."""
    begun.clear()
    places = a.some(3)
    A, *others = places
    a.must(die=1)
    rests_s = 60.0

    def send(c: Any) -> None:
        from_here = a.world.timeline.now
        nodes = [f"h{h.number}" for h in others]
        first, _ = c.options(node=nodes).spmd(large_peer, 2, rests_s)
        c.wait([first.ref])
        time.sleep(0.2)
        (at,) = c.locations(first.ref)
        a.die(next(h for h in others if f"h{h.number}" == at))
        if int(first.result(timeout=HANGS_S)[0]):
            raise WrongEnd("another result")
        if a.world.timeline.now - from_here > rests_s:
            raise WrongEnd("it was made only when the other peer had ended")

    a.run(A, "send", send)
