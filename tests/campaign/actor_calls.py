"""Actors: calls in order, deaths and restarts, names, handles in tasks and elsewhere, their ends.

An actor of a campaign (`tasks.Ledger`) gives with each call the numbers of all calls that its
present process has applied. So what comes shows whether a call was lost, applied twice, or out of
its order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import hoplite_mp
from tests.campaign import tasks
from tests.campaign.hand import PATIENCE_S, call
from tests.campaign.model import MANY, Known, Unexplained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.campaign.hand import Hand

CALLS_MAX = 8
GONE_S = 30.0  # silence of a host, and a manager that begins again, are shorter


def risk(h: Hand) -> Known:
    """What may happen to an actor from here on; it is of one process."""
    return Known(h.world, None, None, retries=0, bound=True)


def applied(
    h: Hand,
    one: Known,
    turn: int,
    futures: dict[int, Any],
    restarts: int,
    others: Sequence[int] = (),
) -> None:
    """What those calls gave, by their numbers; `others` were made by other processes."""
    found: list[tuple[int, ...]] = []
    lost = False
    calm = not h.world.small
    for number, future in futures.items():
        try:
            name, seen = future.result(PATIENCE_S)
        except Exception as error:
            one.judge(error)
            lost = lost or isinstance(error, hoplite_mp.ActorLostError)
            continue
        where = f"call {number} of actor {turn} gave {seen}"
        mine = [n for n in seen if n not in others]
        if name != turn or seen[-1] != number or mine != sorted(mine):
            raise Unexplained(f"{where} of actor {name}")
        if lost and not restarts and number not in others:
            raise Unexplained(f"{where}, and its state was lost before")
        if any(not (one_life(seen, past) or apart(seen, past)) for past in found):
            raise Unexplained(f"{where}, others {found}")
        if calm and number not in others and not (one.died("worker") or one.died("host")):
            wanted = [n for n in futures if n <= number and n not in others]
            if mine != wanted:
                raise Unexplained(f"{where}, and nobody has died")
        found.append(seen)


def one_life(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Can they be of the same process? One has seen what the other has, and more."""
    return a[: len(b)] == b or b[: len(a)] == a


def apart(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Can they be of different ones? No call is applied twice."""
    return not set(a) & set(b)


def refused(one: Known, error: Exception) -> None:
    """It could not be made, or not be called. A host that comes is no place for it."""
    nowhere = "has no workers" in str(error)
    if not (one.died("host") and isinstance(error, ValueError) and nowhere):
        one.judge(error)


def make(h: Hand, turn: int, **options: Any) -> Any:
    """One of this host, or of another; None if it could not be made."""
    if h.dice.random() < 0.4:
        options["node"] = h.any_node()
    return h.c.options(**options).actor(tasks.Ledger, turn)


@call(4)
def actor(h: Hand) -> None:
    """Calls of this process, with refs among their arguments, and one of a task in between."""
    turn = h.next_turn()
    restarts = h.dice.choice((0, 0, MANY))
    one = risk(h)
    try:
        handle = make(h, turn, restarts=restarts)
        futures: dict[int, Any] = {}
        others = []
        numbers = iter(range(CALLS_MAX))
        for number in numbers:
            x = h.steady() if h.dice.random() < 0.3 else None
            futures[number] = handle.note(number, None if x is None else x.ref)
            if x is not None:
                one.above = (*one.above, x)
            if h.dice.random() < 0.3:
                there = next(numbers, None)
                if there is not None:
                    others.append(there)
                    view = h.c.options(retries=0)
                    futures[there] = view.submit(tasks.note_there, handle, there)
                    futures[there].exception(PATIENCE_S)
        if h.dice.random() < 0.5:
            del handle  # it ends after the calls that were made
        applied(h, one, turn, futures, restarts, others)
    except (hoplite_mp.HopliteError, ValueError) as error:
        refused(one, error)


@call(2)
def actor_fails(h: Hand) -> None:
    """What a method raises; a failed argument fails its call alone; a constructor fails all."""
    turn = h.next_turn()
    one = risk(h)
    try:
        handle = make(h, turn, restarts=MANY)
        broken = h.c.options(retries=MANY).submit(tasks.fail, turn)
        futures = [handle.fail(turn), handle.note(1, broken)]
        good = handle.note(2, None)
        for future in futures:
            h.check(Known(h.world, future, None, (one,), error=ZeroDivisionError, born=one.born))
        applied(h, one, turn, {2: good}, MANY)
        never = h.c.actor(tasks.Ledger, None)
        h.check(Known(h.world, never.note(1, None), None, (one,), error=LookupError))
    except (hoplite_mp.HopliteError, ValueError) as error:
        refused(one, error)


@call(2)
def actor_ends(h: Hand) -> None:
    """By close after the calls that were made, by kill at once; later calls are refused."""
    turn = h.next_turn()
    one = risk(h)
    how = h.dice.choice(("close", "kill"))
    h.note(how)
    try:
        handle = make(h, turn, restarts=h.dice.choice((0, MANY)))
        futures = {number: handle.note(number, None) for number in range(4)}
        if how == "kill":
            hoplite_mp.Actor.kill(handle)
            for future in futures.values():
                error = future.exception(PATIENCE_S)
                if error is not None and not isinstance(error, hoplite_mp.ActorLostError):
                    one.judge(error)
        else:
            hoplite_mp.Actor.close(handle)
            applied(h, one, turn, futures, MANY)
        error = handle.note(5, None).exception(PATIENCE_S)
        if not isinstance(error, hoplite_mp.ActorLostError):
            if error is None:
                raise Unexplained(f"a call after {how} of actor {turn} has run")
            one.judge(error)
    except (hoplite_mp.HopliteError, ValueError) as error:
        refused(one, error)


@call(2)
def actor_by_name(h: Hand) -> None:
    """Found by its name while it lives, detached or not; the name is free afterwards."""
    turn = h.next_turn()
    name = f"actor {turn}"
    one = risk(h)
    detached = h.dice.random() < 0.5
    h.note("detached" if detached else "held")
    try:
        handle = make(h, turn, name=name, restarts=MANY, detached=detached)
        futures = {0: handle.note(0, None)}
        if detached:
            futures[0].exception(PATIENCE_S)
            del handle
        try:
            found = h.c.get_actor(name)
        except LookupError:
            if one.died("host") or (h.world.small and futures[0].exception(PATIENCE_S)):
                return
            raise
        futures[1] = found.note(1, None)
        applied(h, one, turn, futures, MANY)
        hoplite_mp.Actor.kill(found)
        deadline = time.monotonic() + GONE_S  # its host may be another one
        while True:
            try:
                h.c.get_actor(name)
            except LookupError:
                break
            if time.monotonic() > deadline:
                raise Unexplained(f"the name of actor {turn} outlives it")
            time.sleep(0.02)
    except (hoplite_mp.HopliteError, ValueError) as error:
        refused(one, error)
