"""Never two managers that both decide, whatever the network and the clocks do; and one, at last.

A machine plays one manager, one standby and some nodes. Every message may be lost, late, doubled or
overtaken; each host's clock has a rate of its own; processes of managers die and begin again; hosts
come and go by the manager's decision while the ones that went still live and vote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hoplite_mp._planner import terms
from hoplite_mp._planner.terms import Candidate, Hosts, Knowledge, ManagerLease, Voter

LEASE_S, PROMISE_S = terms.lease_s(1.0), terms.promise_s(1.0)
FIRST, STANDBY = 0, 1  # nodes of the two managers' hosts
NODES = 7
RATE_MOST = terms.PROMISE_LEASES - 0.01
few = st.sets(st.integers(0, NODES - 1), max_size=3)
some = few | few.map(lambda left_out: set(range(NODES)) - left_out)


@dataclass
class World:
    """Everybody, and what is on its way."""

    rates: list[float]
    now: float = 0.0
    identities: int = 0
    manager: ManagerLease | None = None  # of the first host; None: its process is down
    candidate: Candidate | None = None
    second: ManagerLease | None = None  # the standby's, when it leads
    voters: list[Voter] = field(default_factory=list)
    mail: list[tuple[str, int, Any]] = field(default_factory=list)  # (kind, node, what)
    there: set[int] = field(default_factory=set)  # nodes that have ever joined

    def clock(self, node: int) -> float:
        return 1000 * node + self.now * self.rates[node]

    def stand(self) -> None:
        """The standby's process begins: it knows nothing."""
        self.identities += 1
        self.second = None
        self.candidate = Candidate(STANDBY, self.identities)
        self.mail = [one for one in self.mail if one[0] not in ("offer", "voted", "second follows")]

    def deliver(self, kind: str, node: int, what: Any) -> None:
        if node not in self.there:
            return
        voter = self.voters[node]
        now = self.clock(node)
        if kind == "leads":
            term, at, lists, sent = what
            if voter.hear(term, at, lists, now):
                whose = "follows" if at == FIRST else "second follows"
                self.mail.append((whose, node, (voter.term, sent, voter.version)))
        elif kind == "asked":
            if voter.vote(*what, now):
                self.mail.append(("voted", node, (voter.term, voter.knowledge)))
        elif kind == "follows" and self.manager is not None:
            self.manager.followed(node, *what)
        elif kind == "second follows" and self.second is not None:
            self.second.followed(node, *what)
        elif kind == "offer" and self.candidate is not None:
            self.candidate.offer(node, what)
        elif kind == "voted" and self.candidate is not None:
            self.candidate.voted(node, *what)
            if self.candidate.has_won:
                self.second = self.candidate.lease(LEASE_S)
                self.candidate = None

    def say(self, lease: ManagerLease) -> None:
        """A beat of a manager, to all that it may ever have known."""
        now = self.clock(lease.at)
        for node in range(NODES):
            word = (lease.term, lease.at, lease.words_for(node), now)
            self.mail.append(("leads", node, word))

    def ask(self) -> None:
        if self.candidate is not None:
            for node in self.candidate.ask(self.clock(STANDBY)):
                self.mail.append(("asked", node, (self.candidate.term, self.candidate.identity)))

    def offer(self, node: int) -> None:
        if node == FIRST or node not in self.there:
            return  # it waits for its own manager
        voter = self.voters[node]
        if voter.is_free(self.clock(node)):
            self.mail.append(("offer", node, voter.knowledge))

    def deciding(self) -> list[ManagerLease]:
        both = [one for one in (self.manager, self.second) if one is not None]
        return [one for one in both if one.decides(self.clock(one.at))]


class Managers(RuleBasedStateMachine):
    @initialize(
        rates=st.lists(st.floats(1.0, RATE_MOST), min_size=NODES, max_size=NODES),
        size=st.integers(2, NODES),
    )
    def begin(self, rates: list[float], size: int) -> None:
        self.world = world = World(rates)
        world.voters = [Voter(PROMISE_S, world.clock(node)) for node in range(NODES)]
        world.manager = ManagerLease(1, FIRST, LEASE_S)
        world.manager.change(tuple(range(size)))
        world.there = set(range(size))
        world.stand()
        self.settle(range(NODES))

    def settle(self, nodes: range | set[int]) -> None:
        """Beats and answers go well for a moment, among these."""
        for _ in range(3):
            for lease in (self.world.manager, self.world.second):
                if lease is not None and lease.at in nodes:
                    self.world.say(lease)
            self.flow(nodes)

    def flow(self, nodes: range | set[int]) -> None:
        while ready := [one for one in self.world.mail if one[1] in nodes]:
            self.world.mail = [one for one in self.world.mail if one[1] not in nodes]
            for one in ready:
                self.world.deliver(*one)

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.5, 0.95, 1.0, 1.05, 1.2]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(which=st.booleans(), nodes=some)
    def beat(self, which: bool, nodes: set[int]) -> None:
        """And what comes of it at some nodes."""
        lease = self.world.manager if which else self.world.second
        if lease is not None:
            self.world.say(lease)
            self.flow(nodes)

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.world.mail:
            one = data.draw(st.sampled_from(self.world.mail))
            if data.draw(st.booleans()):
                self.world.mail.remove(one)
            self.world.deliver(*one)

    @rule(kept=st.integers(0, 5))
    def lose(self, kept: int) -> None:
        self.world.mail = self.world.mail[len(self.world.mail) - kept :] if kept else []

    @rule(nodes=some, through=st.booleans(), after=st.sampled_from([0.0, 0.95, 1.05, 2.0]))
    def look_for_another(self, nodes: set[int], through: bool, after: float) -> None:
        """Those of them that are free offer themselves; perhaps all that follows goes well."""
        self.world.now += after
        for node in nodes:
            self.world.offer(node)
        if through:
            self.flow(nodes)
            self.world.ask()
            self.flow(nodes)

    @rule()
    def ask(self) -> None:
        self.world.ask()

    @rule(nodes=some, which=st.booleans())
    def change_hosts(self, nodes: set[int], which: bool) -> None:
        lease = self.world.manager if which else self.world.second
        if lease is not None and lease in self.world.deciding():
            lease.change(tuple(sorted(nodes & self.world.there | {lease.at})))

    @rule(which=st.booleans())
    def one_joins(self, which: bool) -> None:
        world = self.world
        lease, node = world.manager if which else world.second, len(world.there)
        if lease is not None and lease in world.deciding() and node < NODES:
            world.voters[node] = Voter(PROMISE_S, world.clock(node))
            world.there.add(node)
            lease.joined(node, world.clock(lease.at))
            lease.change((*lease.lists[-1].nodes, node))

    @precondition(lambda self: self.world.manager is not None)
    @rule()
    def the_manager_dies(self) -> None:
        self.world.manager = None
        self.world.mail = [one for one in self.world.mail if one[0] != "follows"]

    @precondition(lambda self: self.world.manager is None)
    @rule()
    def it_is_started_again(self) -> None:
        """The node of its host tells it what it knew."""
        known = self.world.voters[FIRST].knowledge
        if known.term == 1:
            lease = self.world.manager = ManagerLease(1, FIRST, LEASE_S, known.lists)
            lease.followed(FIRST, 1, self.world.clock(FIRST), self.world.voters[FIRST].version)

    @rule()
    def the_standby_dies(self) -> None:
        self.world.stand()

    @rule(cut=st.sets(st.integers(2, NODES - 1)))
    def at_last(self, cut: set[int]) -> None:
        """The standby can speak to a majority of the hosts that count, and the first manager to
        nobody: it takes over, or leads already."""
        world = self.world
        there = world.there - cut - {FIRST}
        world.mail = []
        latest = Candidate.latest({n: world.voters[n].knowledge for n in there})
        if latest is None or not latest.has_majority(there):
            return
        if world.second is not None and not all(one.has_half(there) for one in world.second.lists):
            return  # it has just decided something, and half of the hosts of before must hear it
        world.now += 3 * PROMISE_S
        if world.second is not None:
            self.settle(there)
        else:
            for node in there:
                world.offer(node)
            self.flow(there)
            world.ask()
            self.flow(there)
            self.settle(there)
        assert world.second is not None
        assert world.second in world.deciding()

    @invariant()
    def one_decides(self) -> None:
        if hasattr(self, "world"):
            assert len(self.world.deciding()) < 2


Managers.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestManagers = Managers.TestCase


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_random_elections_of_many_seeds_hold() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(max_examples=3000, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(Managers, settings=many)


def led(*nodes: int) -> tuple[ManagerLease, dict[int, Voter]]:
    """A manager of these hosts, all of whom have answered at 0."""
    lease = ManagerLease(1, nodes[0], LEASE_S)
    lease.change(nodes)
    voters = {node: Voter(PROMISE_S, 0.0) for node in nodes}
    for _ in range(2):
        answer(lease, voters, 0.0)
    return lease, voters


def answer(lease: ManagerLease, voters: dict[int, Voter], now: float) -> None:
    for node, voter in voters.items():
        if voter.hear(lease.term, lease.at, lease.words_for(node), now):
            lease.followed(node, voter.term, now, voter.version)


def elect(voters: dict[int, Voter], *nodes: int, now: float, force: bool = False) -> Candidate:
    """What comes of it when these are all that a standby on the first of them can reach."""
    candidate = Candidate(nodes[0], 9)
    if force:
        candidate.force()
    for node in nodes:
        if voters[node].is_free(now):
            candidate.offer(node, voters[node].knowledge)
    for node in candidate.ask(now):
        if voters[node].vote(candidate.term, 9, now):
            candidate.voted(node, candidate.term, voters[node].knowledge)
    return candidate


@pytest.mark.parametrize(("size", "bound", "decides"), [(1, 0, 1), (2, 0, 1), (3, 0, 0), (3, 1, 1),
                         (4, 0, 0), (4, 1, 1), (5, 1, 0), (5, 2, 1)])  # fmt: skip
def test_lease_decides_with_a_majority_of_hosts(size: int, bound: int, decides: bool) -> None:
    lease, voters = led(*range(size))
    assert lease.decides(LEASE_S - 0.01)
    answer(lease, {node: voters[node] for node in range(1, bound + 1)}, LEASE_S)
    assert lease.decides(LEASE_S) is bool(decides)


def test_standby_takes_over_after_the_lease_expires() -> None:
    lease, voters = led(0, 1, 2)
    assert not elect(voters, 1, 2, now=PROMISE_S - 0.01).has_won
    candidate = elect(voters, 1, 2, now=PROMISE_S)
    assert candidate.has_won
    assert candidate.absent() == {0}
    assert not lease.decides(PROMISE_S)
    second = candidate.lease(LEASE_S)
    assert second.decides(PROMISE_S)
    assert second.change((1, 2))
    answer(second, voters, PROMISE_S)
    assert [one.nodes for one in second.lists] == [(1, 2)]
    assert not voters[1].hear(1, 0, (), PROMISE_S)  # the first one is back
    answer(lease, voters, PROMISE_S)
    assert not lease.decides(PROMISE_S)


def test_second_of_two_hosts_leads_only_by_promotion() -> None:
    _, voters = led(0, 1)
    assert not elect(voters, 1, now=100.0).has_won
    candidate = elect(voters, 1, now=100.0, force=True)
    assert candidate.has_won
    second = candidate.lease(LEASE_S)
    assert second.lists[-1].nodes == (1,)
    assert second.decides(1e6)


def test_standby_without_its_own_node_does_not_lead() -> None:
    _, voters = led(0, 1, 2, 3, 4)
    voters[1].hear(1, 0, (), 50.0)
    assert not elect(voters, 1, 2, 3, 4, now=50.0).has_won


def test_hosts_that_left_do_not_count() -> None:
    lease, voters = led(0, 1, 2, 3, 4)
    for node in (1, 2, 3):
        lease.ended(node)
    assert lease.decides(100.0)
    lease.change((0, 4))
    answer(lease, {0: voters[0]}, 100.0)
    assert [one.nodes for one in lease.lists] == [(0, 4)]


def test_voter_list_counts_until_half_of_it_knows_a_later_one() -> None:
    lease, voters = led(0, 1, 2, 3, 4)
    lease.change((0, 1, 2))
    assert [len(one.nodes) for one in lease.lists] == [5, 3]
    answer(lease, {0: voters[0], 1: voters[1]}, 0.0)
    answer(lease, {1: voters[1]}, 0.0)
    assert len(lease.lists) == 2
    answer(lease, {2: voters[2]}, 0.0)
    assert len(lease.lists) == 1


def test_lists_known_to_the_managers_node_are_sent_to_others() -> None:
    """Else a manager that is started again would not know what others go by."""
    lease, voters = led(0, 1, 2)
    lease.change((0, 1, 2, 3))
    assert lease.words_for(1) == ()
    answer(lease, {0: voters[0]}, 1.0)
    assert lease.words_for(1)[-1].nodes == (0, 1, 2, 3)


def test_node_votes_once_per_term() -> None:
    voter = Voter(PROMISE_S, 0.0)
    assert voter.vote(2, 7, 10.0)
    assert voter.vote(2, 7, 10.0)  # it has not heard that
    assert not voter.vote(2, 8, 20.0)
    assert voter.vote(3, 8, 20.0)
    assert voter.knowledge == Knowledge(3, None, ())


def test_majority_is_that_of_the_latest_known_list() -> None:
    """Three of five would do, but one of them knows that only three are left, and is one of two."""
    candidate = Candidate(1, 9)
    older, later = Hosts(1, (0, 1, 2, 3, 4)), Hosts(2, (0, 4, 5))
    candidate.offer(1, Knowledge(1, 0, (older,)))
    candidate.offer(2, Knowledge(1, 0, (older,)))
    candidate.offer(4, Knowledge(1, 0, (older, later)))
    assert candidate.ask(0.0) == []
    candidate.offer(3, Knowledge(1, 0, (older,)))
    candidate.withdraw(4)
    assert candidate.ask(0.0) == [1, 2, 3]


def test_host_declared_dead_does_not_lead() -> None:
    """Its own node has not heard of it. One that no list has named yet is no such host."""
    candidate = Candidate(1, 9)
    older, later = Hosts(1, (0, 1, 2, 3)), Hosts(2, (0, 2, 3))
    candidate.offer(2, Knowledge(1, 0, (older, later)))
    candidate.offer(3, Knowledge(1, 0, (older,)))
    candidate.offer(1, Knowledge(1, 0, (older,)))
    assert candidate.ask(0.0) == []
    assert candidate.is_struck(candidate.offers)
    candidate.offer(1, Knowledge(1, 0, ()))
    assert candidate.ask(0.0) == [2, 3, 1]
    candidate.offer(1, Knowledge(1, 0, (older,)))
    candidate.force()
    assert candidate.ask(0.0) == [1]  # the others have been asked


def test_host_declared_dead_before_the_next_list_does_not_lead() -> None:
    """The manager dies between its word that the host is gone and its next list. The host, which
    was cut off, would lead the other one, which has gone on without it."""
    candidate = Candidate(2, 9)
    hosts = Hosts(1, (0, 1, 2))
    candidate.offer(2, Knowledge(1, 0, (hosts,), (0,)))
    candidate.offer(1, Knowledge(1, 0, (hosts,), (2,)))
    assert candidate.ask(0.0) == []
    assert candidate.is_struck(candidate.offers)
    candidate.offer(1, Knowledge(1, 0, (hosts,)))
    assert candidate.ask(0.0) == [2, 1]
    candidate.voted(2, candidate.term, Knowledge(1, 0, (hosts,)))
    candidate.voted(1, candidate.term, Knowledge(1, 0, (hosts,), (2,)))  # heard meanwhile
    assert not candidate.has_won


def test_promoted_standby_does_not_wait_for_lost_hosts() -> None:
    """The end of their connections may be noticed late, or never."""
    _, voters = led(0, 1, 2, 3, 4)
    candidate = Candidate(1, 9)
    candidate.force()
    for node in (1, 2, 3):
        candidate.offer(node, voters[node].knowledge)
    assert sorted(candidate.ask(100.0)) == [1, 2, 3]
    candidate.voted(1, candidate.term, voters[1].knowledge)
    candidate.voted(2, candidate.term, voters[2].knowledge)
    candidate.give_up_silent(100.0 + terms.ANSWER_S - 0.01)
    assert not candidate.has_won
    candidate.give_up_silent(100.0 + terms.ANSWER_S)
    assert candidate.has_won
    assert candidate.votes.keys() == {1, 2}

    alone = Candidate(1, 9)
    alone.force()
    for node in (1, 2):
        alone.offer(node, voters[node].knowledge)
    alone.ask(100.0)
    alone.give_up_silent(1e6)
    assert not alone.has_won  # never without its own node
    alone.voted(1, alone.term, voters[1].knowledge)
    assert alone.has_won

    unforced = Candidate(1, 9)
    for node in (1, 2, 3):
        unforced.offer(node, voters[node].knowledge)
    unforced.ask(100.0)
    unforced.voted(1, unforced.term, voters[1].knowledge)
    unforced.give_up_silent(1e6)
    assert not unforced.has_won
    assert unforced.offers.keys() == {1, 2, 3}


def test_node_is_bound_as_long_as_its_manager_counts_its_lease() -> None:
    """Though it was told another limit itself."""
    voter = Voter(PROMISE_S, 0.0)
    voter.bind(4 * LEASE_S)
    voter.hear(1, 0, (), 10.0)
    assert not voter.is_free(10.0 + 4 * LEASE_S)
    assert voter.is_free(10.0 + 4 * LEASE_S * 1.2)
    voter.bind(LEASE_S)  # another manager's: what was promised is promised
    assert not voter.is_free(10.0 + 4 * LEASE_S)


nodes = st.integers(0, NODES - 1)
times = st.integers(0, 12)
deeds = st.one_of(
    st.tuples(st.just("change"), st.sets(nodes)),
    st.tuples(st.just("followed"), nodes, times, st.integers(0, 3)),
    st.tuples(st.just("joined"), nodes),
    st.tuples(st.just("ended"), nodes),
    st.tuples(st.just("wait"), times),
)


@given(st.lists(deeds, max_size=40))
def test_lease_matches_its_definition(done: list[tuple[Any, ...]]) -> None:
    """Half of each list has answered to words of the last `lease_s`, asked at any time."""
    lease, now, sent = ManagerLease(1, FIRST, 4.0), 0.0, dict[int, float]()
    for what, *more in done:
        if what == "change":
            lease.change(tuple(sorted(more[0])))
        elif what == "ended":
            lease.ended(*more)
        elif what == "wait":
            now += more[0] / 4
        else:
            node, at = more[0], now if what == "joined" else now - more[1] / 2
            sent[node] = max(at, sent.get(node, at))
            if what == "joined":
                lease.joined(node, at)
            else:
                lease.followed(node, 1, at, (1 << terms.TERM_SHIFT) + more[2])
        bound = {node for node, at in sent.items() if now < at + 4.0}
        assert lease.decides(now) == lease.suffice(bound)
