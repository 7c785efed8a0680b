"""Deaths of owners at random, while others ask, keep copies and let go, and the manager dies."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._common import ids
from hoplite_mp._planner import owners
from hoplite_mp._protocol.messages import NodeLost
from tests.support.node_hosts import Network, assert_nothing_kept

if TYPE_CHECKING:
    from tests.support.node_hosts import Side


class _Story:
    """Objects, who holds them, and who has asked and waits."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.network = Network(6)
        self.values: dict[bytes, Any] = {}
        self.holds: dict[tuple[bytes, int], Any] = {}
        self.whole: dict[bytes, set[int]] = {}  # by which hosts it is held whole
        self.asked: list[tuple[bytes, Side, list[Any]]] = []

    @property
    def known(self) -> list[bytes]:
        return [one for one, number in self.holds if number in self.network.members]

    def put(self) -> None:
        side = self.rng.choice(self.network.living)
        value = np.full(10_000, float(len(self.values)))
        object_id, hold = side.put(value)
        self.values[object_id], self.whole[object_id] = value, {side.number}
        self.holds[object_id, side.number] = hold

    def ask(self) -> None:
        if self.known:
            lost = [one for one in self.known if ids.unpack_id(one)[0] in self.network.dead]
            side, one = self.rng.choice(self.network.living), self.rng.choice(lost or self.known)
            self.asked.append((one, side, side.hold(one)))

    def keep(self) -> None:
        living = self.network.living
        some = [(one, side) for one in self.known for side in living if side.imports.own(one)]
        some = [(one, at) for one, at in some if not isinstance(_view(at, one), int)]
        if some:
            one, source = self.rng.choice(some)
            side = self.rng.choice(living)
            if side is not source:
                side.keep(one, source)

    def settle(self) -> None:
        self.network.settle(4)
        for one, side, found in self.asked:
            if side.number in self.network.members:
                assert found, "nobody has answered"
                if found[0] is not None:
                    self.holds[one, side.number] = found[0]
        self.asked.clear()

    def read(self) -> None:
        self.settle()
        for one, number in self.rng.sample(sorted(self.holds), min(3, len(self.holds))):
            got = self.network.nodes[number].read(self.holds[one, number])  # type: ignore[attr-defined]
            if isinstance(got, str):
                assert not self.whole[one], (got, self.whole[one])
            else:
                assert np.array_equal(got, self.values[one])
                self.whole[one].add(number)

    def let_go(self) -> None:
        if self.holds:
            one, number = self.rng.choice(sorted(self.holds))
            del self.holds[one, number]
            self.whole[one].discard(number)
            if not any(other == one for other, _ in self.holds):
                self.whole[one] = set()

    def forget(self, side: Side) -> None:
        for key in [key for key in self.holds if key[1] == side.number]:
            del self.holds[key]
        for having in self.whole.values():
            having.discard(side.number)

    def some(self) -> None:
        for _ in range(self.rng.randrange(4)):
            self.rng.choice([self.ask, self.ask, self.let_go, self.keep, self.network.pump])()

    def die(self) -> None:
        """Noticed by the others, then by the manager, which may be another one by then, or hold
        its words back until the next death."""
        network, rng = self.network, self.rng
        side = rng.choice(network.living)
        if len(network.living) <= 2:
            return
        self.settle()
        self.forget(side)
        network.no_manager = rng.random() < 0.3
        network.notice(side)
        self.some()
        if network.no_manager:
            network.held_back = network.held_back or []
            said, network.held_back = network.held_back, []
            network.restart_manager()
            said, network.held_back = network.held_back, None
            for number in set(range(6)) - set(network.members):
                network.report(network.nodes[number])
            network.say(said)
        else:
            network.to_manager(NodeLost(side.number, 0))
            self.some()
            network.held_back = []
            network.report(side)
            self.some()
            said, network.held_back = network.held_back, None
            further = rng.choice(network.living)
            if rng.random() < 0.3:  # the manager dies before all have heard all of it
                heard = {number: rng.randrange(4) for number in network.members}
                for number, many in heard.items():
                    network.say([one for one in said if one[0] == number][:many])
                self.some()
                network.no_manager = True
                self.some()
                network.restart_manager(self.some)
            elif rng.random() < 0.4 and len(network.living) > 2:
                early = {number for number in range(6) if rng.random() < 0.5}
                network.say([one for one in said if one[0] in early])
                self.forget(further)
                network.notice(further)
                self.some()
                network.say([one for one in said if one[0] not in early])
                network.to_manager(NodeLost(further.number, 0))
                network.report(further)
            else:
                network.say(said)
        self.some()
        self.settle()


def _view(side: Side, object_id: bytes) -> Any:
    return side.node.view(side.imports.own(object_id))


@pytest.mark.parametrize("seed", [*range(24), 130, 345])
def test_random_owner_deaths_lose_only_objects_without_copies(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is the object; who asks is answered; it is lost only if no host that lives had
    it whole; in the end nothing is left."""
    if seed % 2:  # the manager's word comes in as many messages as there are objects
        monkeypatch.setattr(owners, "NUMBERS_MAX", 1)
    story = _Story(seed)
    steps = [story.put, story.ask, story.ask, story.keep, story.read, story.let_go, story.settle]
    for _ in range(50):
        story.rng.choice([*steps, story.die])()
    story.settle()
    story.values.clear()
    story.holds.clear()
    assert_nothing_kept(story.network)
    assert not story.network.planner.owners.named
    story.network.close()
