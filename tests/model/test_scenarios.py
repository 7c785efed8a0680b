"""Every interleaving of every scenario keeps every promise, with a kill at any step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from . import scenarios, several_hosts
from .memory import explore
from .waiting import waking

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Scenario

SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "a view and a second life": lambda: scenarios.reuse(readers=(2,)),
    "a ref and a second life": lambda: scenarios.reuse(readers=(3,)),
    "two readers and a second life, nobody killed": lambda: scenarios.reuse(kills=0),
    "a ref is handed over": scenarios.hand_over,
    "an old id beside a ref of the same header": scenarios.two_generations,
    "deleted while it is read": scenarios.deletion,
    "lent, and taken back": scenarios.lent,
    "lent to one that holds it": lambda: scenarios.lent(readers=(3,)),
    "lent to two, nobody killed": lambda: scenarios.lent(kills=0, readers=(2, 3)),
    "spilled while it is read": scenarios.spilling,
    "spilled, and a second life, nobody killed": lambda: scenarios.spilling(kills=0, lives=2),
    "spilled while it is deleted": lambda: scenarios.spilling(deleted=True),
    "from another host": scenarios.from_another_host,
    "from another host, and a second life": lambda: scenarios.from_another_host(kills=0, lives=2),
    "a task, one kill": scenarios.tasks,
    "a task, two kills": lambda: scenarios.tasks(kills=2),
    "a task and a second life": lambda: scenarios.tasks(lives=2),
    "cancelled": lambda: scenarios.cancelling(force=False),
    "cancelled by force": scenarios.cancelling,
    "a ref inside a result": scenarios.result_refs,
    "a ref inside a result, and a second life": lambda: scenarios.result_refs(again=True),
    "lost elsewhere": several_hosts.lost_import,
    "lost elsewhere, nobody killed": lambda: several_hosts.lost_import(kills=0),
    "a lost result, and a second life": several_hosts.lost_result,
    "made again": several_hosts.handed_over,
    "made again, and a second life": lambda: several_hosts.handed_over(again=True),
    "a driver has left": several_hosts.left,
    "waking": waking,
}


# Ten seconds each; the mutations are found by the others, too.
LARGE = (
    "spilled while it is read",
    "from another host",
    "lost elsewhere",
    "a task, two kills",
    "a task and a second life",
    # These take steps that others of the quick run take, too.
    "spilled, and a second life, nobody killed",
    "lent to two, nobody killed",
    "made again",
    "cancelled",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in LARGE else ()) for name in SCENARIOS],
)
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    outcome = explore(SCENARIOS[name]())
    print(outcome)
    assert outcome.violation is None, str(outcome)
