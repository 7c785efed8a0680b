"""Objects that have had two owners, both of whom have died, and a manager that knows neither.

The first owner's death was decided by a manager that died: it had told the second owner, and one of
two other hosts, who that owner is. Then the second owner died as well. So one host reports the
object under its first owner, and the other one under the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol.membership import ReportComplete
from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from tests.support.node_hosts import Network, Side

LATER = 1000.0  # when the planner no longer waits for reports
# The first owner, the second one, who has not heard of that one, and who has. The round about the
# owner with the lower number is reported first.
ROLES = [(0, 1, 2, 3), (3, 0, 1, 2)]


class Twice:
    """The four hosts, and the object, which `unaware` and `aware` hold."""

    def __init__(self, network: Network, roles: tuple[int, ...], copies: str) -> None:
        """copies: who has the whole object besides the first owner and the second one."""
        self.network = network
        self.first, self.second, self.unaware, self.aware = (network.living[at] for at in roles)
        self.object_id, self.mine = self.first.put(BIG)
        for side in (self.second, getattr(self, copies)):
            side.keep(self.object_id, self.first)
        network.pump()
        self.holds = [remote_hold(network, side, self.object_id)[0] for side in self.holders]
        network.held_back = []
        network.lose(self.first)
        held, network.held_back = network.held_back, None
        assert {owner for _, one in held for owner in one.owners} == {self.second.number}
        heard = self.second.number, self.aware.number
        network.say([one for one in held if one[0] in heard])
        network.settle()

    @property
    def holders(self) -> tuple[Side, Side]:
        return self.unaware, self.aware

    def lose_both(self, noticed: bool) -> None:
        """The manager dies, and the second owner. noticed: the nodes learn of that owner's death
        before they report to the next manager, not after."""
        network = self.network
        network.held_back = []
        if noticed:
            network.no_manager = True
            network.notice(self.second)
            network.restart_manager()
        else:
            self._restart_without_it()
        held, network.held_back = network.held_back, None
        network.say(held)
        network.settle()

    def _restart_without_it(self) -> None:
        network = self.network
        others = [side for side in network.living if side is not self.second]
        network.planner = Planner(again=True, own=others[0].number)
        for side in others:
            network.returns(side)
            for message in list(side.recovery.owners.report_again()):
                network.to_manager(message)
        for side in others:
            network.to_manager(ReportComplete(side.number))
        network.planner.tick(LATER)
        network.notice(self.second)
        network.admit()

    def check(self) -> None:
        """All know the same owner, who counts all others."""
        owner = self.network.nodes[self.network.planner.owners.named[self.object_id]]
        for side in self.holders:
            found = side.imports.all_of(self.object_id)
            assert {one.owner for one in found} == {owner.host_id}
            assert any(one.number for one in found)
        export = owner.exports.exports[owner.imports.own(self.object_id)]
        counted = {
            (side.host_id, one.number)
            for side in self.holders
            for one in side.imports.all_of(self.object_id)
            if one.number and side is not owner
        }
        assert export.importers == counted

    def end(self) -> None:
        self.holds.clear()
        del self.mine
        assert_nothing_kept(self.network)
        assert not self.network.planner.owners.named


@pytest.fixture(params=ROLES)
def roles(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("copies", ["aware", "unaware"])
def test_second_new_owner_counts_all_holders(
    network: Network, roles: tuple[int, ...], copies: str, noticed: bool
) -> None:
    twice = Twice(network, roles, copies)
    twice.lose_both(noticed)
    twice.check()
    for side, hold in zip(twice.holders, twice.holds, strict=True):
        assert (side.read(hold) == BIG).all()
    del hold
    twice.end()


@pytest.mark.parametrize("noticed", [False, True])
def test_object_of_the_second_new_owner_is_readable_after_a_release(
    network: Network, roles: tuple[int, ...], noticed: bool
) -> None:
    twice = Twice(network, roles, "aware")
    twice.lose_both(noticed)
    twice.holds.pop()
    network.settle()
    assert (twice.unaware.read(twice.holds[0]) == BIG).all()
    twice.end()
