"""Workers of one's own: executors with initializers, that replace their workers, that are left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hoplite_mp
from tests.campaign import tasks
from tests.campaign.hand import PATIENCE_S, call
from tests.campaign.model import MANY, Known

if TYPE_CHECKING:
    from tests.campaign.hand import Hand


@call(2)
def pool(h: Hand) -> None:
    turn, x = h.next_turn(), h.array(1000, "f8")
    size = h.dice.randint(1, 2)
    per_child = h.dice.choice((None, None, 2))
    one = Known(h.world, None, None, bound=True, retries=0)
    try:
        with h.c.executor(
            size, initializer=tasks.set_up, initargs=(turn,), max_tasks_per_child=per_child,
            retries=MANY,
        ) as own:  # fmt: skip
            futures = [own.submit(tasks.after_set_up, i) for i in range(6)]
            doubled = own.submit(tasks.double, h.c.put(x))
            nested = own.submit(tasks.nested, 2, x)
            h.check(Known(h.world, doubled, x * 2))
            h.check(Known(h.world, nested, x * 5))
            for i, future in enumerate(futures):
                h.check(Known(h.world, future, (turn, i)))
            if h.dice.random() < 0.5:
                found = list(own.map(tasks.after_set_up, range(5), timeout=PATIENCE_S))
                h.same(found, [(turn, i) for i in range(5)])
    except (hoplite_mp.HopliteError, ValueError) as error:
        one.judge(error)


@call(1)
def pool_that_is_left(h: Hand) -> None:
    """Without waiting, with what waits cancelled; what runs gives its result."""
    x = h.array(1000, "f8")
    own = h.c.executor(1, retries=MANY)
    futures = [own.submit(tasks.slow, x, 0.02) for _ in range(4)]
    own.shutdown(wait=h.dice.random() < 0.5, cancel_futures=True)
    for future in futures:
        h.check(Known(h.world, future, x + 1, cancelled=True))


@call(1)
def pool_that_cannot_start(h: Hand) -> None:
    """What its initializer raises is the end of all its tasks."""
    turn = h.next_turn()
    with h.c.executor(1, initializer=tasks.set_up_badly, initargs=(turn,)) as own:
        try:
            future = own.submit(tasks.after_set_up, 1)
            assert future.exception(PATIENCE_S) is not None
        except hoplite_mp.WorkerLostError:
            return
        error = future.exception()
        assert isinstance(error, hoplite_mp.WorkerLostError), error
