"""What can happen to copies: fetches, broadcasts, deaths, parents that fail, in any order.

There is no model of which parents are best; instead the walk keeps every plan that has been
announced and not withdrawn, as the nodes would, and checks after each step what must hold whoever
was chosen: a request ends in a plan or a refusal, nobody waits in a circle or for the dead, and
nobody serves what it neither holds nor receives.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from hoplite_mp._planner.program import participants, program_of
from hoplite_mp._protocol import messages as m
from tests.support.planner_edges import check_edges
from tests.support.planner_scenarios import letter_id
from tests.support.planner_walk import LATE, NODES, RARELY, Walk

OBJECTS = st.sampled_from("aab")
HOLDERS = st.lists(st.integers(0, 2), unique=True, min_size=1, max_size=3)
SIZES = st.sampled_from([1 << 10, 1 << 20, 1 << 26])
SECONDS = st.sampled_from([0.0, 0.01, 1.0])


class CopyWalk(Walk):
    """Copies as the nodes see them."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[int, m.Distribute] = {}  # announced, by epoch
        self.following: dict[tuple[int, bytes], int] = {}  # receiver, object -> latest epoch
        self.holding: dict[bytes, set[int]] = {}  # whole copies that the planner has heard of
        self.broadcasts: dict[int, tuple[int, bytes, set[int]]] = {}  # who asked, of what, for whom
        self.broadcast_ids = 1000

    def hear(self, sends: list[tuple[int, m.ManagerToNode]]) -> list[tuple[int, m.ManagerToNode]]:
        """Do as nodes do with what they are told; gives back what is not about copies."""
        rest: list[tuple[int, m.ManagerToNode]] = []
        new: dict[int, set[int]] = {}
        for node, message in sends:
            if isinstance(message, m.Distribute):
                new.setdefault(message.epoch, set()).add(node)
                assert self.plans.setdefault(message.epoch, message) == message
                if node in message.receivers:
                    self.following[node, message.object] = message.epoch
            elif isinstance(message, m.Withdraw):
                self.plans.pop(message.epoch, None)
            elif isinstance(message, m.FetchRefused):
                assert self.following.pop((node, message.object), None) is not None or True
            else:
                rest.append((node, message))
        for epoch, told in new.items():
            if epoch in self.plans:
                plan = self.plans[epoch]
                assert told == set(participants(plan))
                growing = {n for (n, one), _ in self.following.items() if one == plan.object}
                check_edges(plan, frozenset(growing))
        return self.hear_commits(rest)

    def hear_commits(
        self, sends: list[tuple[int, m.ManagerToNode]]
    ) -> list[tuple[int, m.ManagerToNode]]:
        rest: list[tuple[int, m.ManagerToNode]] = []
        for node, message in sends:
            number = getattr(message, "operation", None)
            if number not in self.broadcasts:
                rest.append((node, message))
                continue
            asker, object_id, to = self.broadcasts.pop(number)
            assert node == asker
            if isinstance(message, m.Commit):
                living = to & set(self.living)
                assert living <= self.holding.get(object_id, set())
            else:
                assert isinstance(message, m.OperationFailed)
        return rest

    # ---- what happens

    @rule(node=NODES, letter=OBJECTS, nbytes=SIZES, holders=HOLDERS, times=st.sampled_from([1, 2]))
    def fetch(self, node: int, letter: str, nbytes: int, holders: list[int], times: int) -> None:
        object_id = letter_id(letter)
        known = (node, object_id) in self.following
        for _ in range(times):
            sends = self.step(m.FetchRequested(node, object_id, nbytes, tuple(holders)))
            if node not in self.living:
                assert sends == []
                return
            self.holding.setdefault(object_id, set()).update(set(holders) & set(self.living))
            receiving = {n for n, one in self.following if one == object_id}
            self.holding[object_id] -= {node, *receiving}
            if known:
                assert sends == []  # a double, but for what it says of holders
                return
            mine = [message for to, message in sends if to == node]
            assert any(isinstance(one, m.Distribute | m.FetchRefused) for one in mine)
            assert self.hear(sends) == []
            known = (node, object_id) in self.following

    @rule(letter=OBJECTS, node=NODES, late=LATE)
    def fetched(self, letter: str, node: int, late: int) -> None:
        object_id = letter_id(letter)
        epoch = self.following.get((node, object_id), 1) - late
        if epoch < 0:
            return
        known = (node, object_id) in self.following and not late
        if known:
            del self.following[node, object_id]
            self.holding.setdefault(object_id, set()).add(node)
            for _, one, to in self.broadcasts.values():
                if one == object_id:
                    to.discard(node)  # served, also if it gives its copy up before the end
        sends = self.step(m.FetchComplete(node, object_id, epoch))
        if not known:
            assert sends == []
        assert self.hear(sends) == []

    @rule(letter=OBJECTS, node=NODES, parent=st.integers(0, 2), late=LATE, rarely=RARELY)
    def parent_failed(self, letter: str, node: int, parent: int, late: int, rarely: bool) -> None:
        object_id = letter_id(letter)
        if not rarely:
            return
        epoch = self.following.get((node, object_id), 1) - late
        if epoch < 0:
            return
        sends = self.step(m.FetchFailed(node, object_id, epoch, parent, "reset"))
        if late or (node, object_id) not in self.following:
            assert sends == []
            return
        for to, message in sends:
            if to == node and isinstance(message, m.Distribute) and node in message.receivers:
                # It gets others than the one that failed it.
                parents = {pull.parent for pull in program_of(message, node).pulls}
                assert parent not in parents
        assert self.hear(sends) == []

    @rule(letter=OBJECTS, node=NODES, rarely=RARELY)
    def drop(self, letter: str, node: int, rarely: bool) -> None:
        if not rarely or node not in self.living:
            return
        object_id = letter_id(letter)
        self.holding.get(object_id, set()).discard(node)
        self.following.pop((node, object_id), None)
        assert self.hear(self.step(m.CopyDropped(node, object_id))) == []

    @rule(letter=OBJECTS, rarely=RARELY)
    def gone(self, letter: str, rarely: bool) -> None:
        if not rarely:
            return
        object_id = letter_id(letter)
        sends = self.step(m.ObjectDeleted(object_id))
        receivers = {node for node, one in self.following if one == object_id}
        refused = {node for node, message in sends if isinstance(message, m.FetchRefused)}
        assert refused == receivers
        self.holding.pop(object_id, None)
        assert self.hear(sends) == []
        assert not any(plan.object == object_id for plan in self.plans.values())

    @rule(letter=OBJECTS, node=NODES, holder=NODES, to=HOLDERS, nbytes=SIZES)
    def broadcast(self, letter: str, node: int, holder: int, to: list[int], nbytes: int) -> None:
        object_id = letter_id(letter)
        if node not in self.living or holder not in self.living or len(self.broadcasts) > 2:
            return
        if (holder, object_id) in self.following:
            return  # it does not hold what it still receives
        self.broadcast_ids += 1
        number = self.broadcast_ids
        message = m.ReduceRequested(
            number, node, 1, (object_id,), "sum", 1, kind="broadcast", to=tuple(to)
        )
        sends = self.step(message)
        if not set(to) & set(self.living):
            assert isinstance(sends[0][1], m.OperationFailed)
            return
        assert sends == []
        # Whoever holds it now counts as served, also if it gives its copy up before the end.
        holding = self.holding.get(object_id, set()) | {holder}
        lacking = set(to) & set(self.living) - holding
        self.broadcasts[number] = (node, object_id, lacking)
        self.holding.setdefault(object_id, set()).add(holder)
        assert self.hear(self.step(m.SourceReady(number, 0, holder, nbytes))) == []

    @rule(node=NODES, peer=NODES, rate=st.sampled_from([None, 1e7, 1e9]))
    def measured(self, node: int, peer: int, rate: float | None) -> None:
        assert self.step(m.LinkMeasured(node, peer, 1e-4, rate)) == []
        assert self.step(m.HostMeasured(node, rate, rate)) == []

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def end_copies(
        self, node: int, sends: list[tuple[int, m.ManagerToNode]]
    ) -> list[tuple[int, m.ManagerToNode]]:
        for one in self.holding.values():
            one.discard(node)
        self.following = {pair: e for pair, e in self.following.items() if pair[0] != node}
        mine = [n for n, (asker, _, _) in self.broadcasts.items() if asker == node]
        for number in mine:
            del self.broadcasts[number]
        for _, _, to in self.broadcasts.values():
            to.discard(node)  # also if its next life has begun: nobody waits for that one
        rest = self.hear(sends)
        # Plans of which nobody is left to be told are over without a word.
        for epoch, plan in list(self.plans.items()):
            if not set(participants(plan)) & set(self.living):
                del self.plans[epoch]
        return [send for send in rest if not isinstance(send[1], m.Forget)]

    # ---- what always holds

    @invariant()
    def plans_are_what_the_planner_thinks(self) -> None:
        entries = self.planner.copies.entries
        transfers = {e for entry in entries.values() for e in entry.transfers}
        assert transfers == set(self.plans)
        following = {
            (node, entry.object): epoch
            for entry in entries.values()
            for node, epoch in entry.receiving.items()
        }
        assert following == self.following
        for entry in entries.values():
            assert not set(entry.whole) & set(entry.receiving)
            assert entry.transfers or entry.whole
            assert set(entry.whole) <= self.holding.get(entry.object, set())
            for epoch, transfer in entry.transfers.items():
                waiting = {n for n, e in entry.receiving.items() if e == epoch}
                assert set(transfer.waiting) == waiting
                assert waiting

    @invariant()
    def nobody_waits_in_a_circle_or_for_the_dead(self) -> None:
        waits: dict[tuple[int, bytes, int], set[tuple[int, bytes, int]]] = {}
        for (node, object_id), epoch in self.following.items():
            for pull in program_of(self.plans[epoch], node).pulls:
                assert pull.parent in self.living
                # One point of each stripe stands for all: parents' stripes end where ours do.
                for place in {pull.begin_share, pull.end_share - 1}:
                    self.check_ends(node, object_id, place, [])
        assert not waits

    def check_ends(self, node: int, object_id: bytes, place: int, trail: list[int]) -> None:
        """Following the parents from here one comes to who holds the object whole."""
        assert node not in trail, (object_id, place, trail)
        if node in self.holding.get(object_id, ()):
            return
        assert (node, object_id) in self.following, "it serves what it neither has nor gets"
        plan = self.plans[self.following[node, object_id]]
        for pull in program_of(plan, node).pulls:
            if pull.begin_share <= place < pull.end_share:
                self.check_ends(pull.parent, object_id, place, [*trail, node])

    @invariant()
    def broadcasts_wait_for_somebody(self) -> None:
        operations = self.planner.reductions.operations
        for number, (_, object_id, _) in self.broadcasts.items():
            unfinished = operations[number].unfinished
            assert unfinished
            for node in unfinished:
                assert (node, object_id) in self.following

    @invariant()
    def nothing_is_counted_as_busy_without_a_plan(self) -> None:
        busy = self.planner.copies._busy
        sending = {n for plan in self.plans.values() for n in participants(plan)}
        assert set(busy) <= sending
