"""What has come for one member of a Group: order, what is lost with a host, the end of senders."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hoplite_mp._node.groups.mailbox import End, Mailbox, QueuedMessage
from hoplite_mp._protocol.local import INBOX_MAX


class Told:
    """A box, and what its member would have fetched."""

    def __init__(self, size: int = 3, joined_in: int = 1) -> None:
        self.news = 0
        self.box = Mailbox(size, joined_in, self.announced)
        self.seen = 0
        self.got: list[tuple[int, int]] = []  # (source, oid)

    def announced(self) -> None:
        self.news += 1

    def fetch(self) -> None:
        more = True
        while more:
            found, _, _, more = self.box.messages_after(self.seen)
            for number, source, _, oid in found:
                self.seen = number
                self.got.append((source, oid))


def letter(source: int, oid: int, *, ready: bool = False) -> QueuedMessage:
    return QueuedMessage(source, 0, oid, ["hold"], ready)


def test_large_message_is_not_overtaken() -> None:
    told = Told()
    large, small = letter(1, 10), letter(1, 11, ready=True)
    told.box.add(1, 5, large)
    told.box.add(1, 5, small)
    told.box.add(2, 6, letter(2, 20, ready=True))
    told.fetch()
    assert told.got == [(2, 20)]
    told.box.ready(large, 5)
    told.fetch()
    assert told.got == [(2, 20), (1, 10), (1, 11)]


def test_end_of_a_sender_follows_its_messages() -> None:
    told = Told()
    told.box.set_present(0b111, formed=True)
    large = letter(1, 10)
    told.box.add(1, 5, large)
    told.box.expect_end(1, 5, 3)
    told.box.set_present(0b101, formed=True)
    told.box.add(1, 5, End(1, 3))
    assert (told.box.gone, told.box.ended) == (0, [0, 0, 0])
    told.box.ready(large, 5)
    assert (told.box.gone, told.box.ended) == (0b010, [0, 1, 0])


@pytest.mark.parametrize("first", ["end", "manager"])
def test_end_and_membership_change_arrive_in_any_order(first: str) -> None:
    told = Told()
    told.box.set_present(0b111, formed=True)
    for step in (first, "manager" if first == "end" else "end"):
        assert told.box.gone == 0
        if step == "end":
            told.box.add(1, 5, End(1, 3))
        else:
            told.box.expect_end(1, 5, 3)
            told.box.set_present(0b101, formed=True)
    assert (told.box.gone, told.box.ended) == (0b010, [0, 1, 0])


def test_lost_host_leaves_a_prefix_of_its_messages() -> None:
    told = Told()
    told.box.set_present(0b111, formed=True)
    letters = [letter(1, at, ready=at != 2) for at in range(5)]
    for one in letters:
        told.box.add(1, 5, one)
    told.box.expect_end(1, 5, 3)
    told.box.set_present(0b101, formed=True)
    told.box.lose_node(5)
    told.box.ready(letters[2], 5)  # too late
    told.box.add(1, 5, letter(1, 9, ready=True))
    told.fetch()
    assert told.got == [(1, 0), (1, 1)]
    assert (told.box.gone, told.box.ended) == (0b010, [0, 1, 0])


def test_end_of_a_sender_from_before_the_join_is_ignored() -> None:
    told = Told(joined_in=7)
    told.box.set_present(0b111, formed=True)
    told.box.add(1, 5, End(1, 6))
    assert told.box.ended == [0, 0, 0]


def test_no_rank_is_gone_before_the_group_is_formed() -> None:
    told = Told()
    told.box.set_present(0b001, formed=False)
    assert told.box.gone == 0
    told.box.set_present(0b101, formed=True)
    assert told.box.gone == 0b010


def test_many_messages_are_listed_in_batches() -> None:
    told = Told()
    count = 2 * INBOX_MAX + 5
    for at in range(count):
        told.box.add(1, 5, letter(1, at, ready=True))
    assert told.box.messages_after(0)[3]
    told.fetch()
    assert [oid for _, oid in told.got] == list(range(count))


def test_closed_mailbox_holds_nothing() -> None:
    told = Told()
    here, coming = letter(1, 1, ready=True), letter(1, 2)
    told.box.add(1, 5, here)
    told.box.add(1, 5, coming)
    told.box.close()
    assert (told.box.arrived, coming.holds) == ({}, [])


@pytest.mark.parametrize("seed", range(200))
def test_random_events_keep_each_senders_order(seed: int) -> None:
    """What is named of each sender is a prefix of what it has sent, all of it if its host lives;
    then, and only then, its end."""
    dice = random.Random(seed)
    told = Told()
    told.box.set_present(0b111, formed=True)
    sent: dict[int, list[Any]] = {1: [], 2: []}
    open_: list[QueuedMessage] = []
    ended: set[int] = set()
    lost: set[int] = set()
    version = 2
    for step in range(dice.randint(5, 40)):
        rank = dice.choice((1, 2))
        what = dice.random()
        if what < 0.5 and rank not in ended and rank not in lost:
            one = letter(rank, step, ready=dice.random() < 0.5)
            sent[rank].append(one)
            open_ += [] if one.ready else [one]
            told.box.add(rank, rank, one)
        elif what < 0.85 and open_:
            one = open_.pop(dice.randrange(len(open_)))
            told.box.ready(one, one.source)
        elif what < 0.9 and rank not in ended:
            ended.add(rank)
            version += 1
            told.box.expect_end(rank, rank, version)
            if rank not in lost:
                told.box.add(rank, rank, End(rank, version))
            else:
                told.box.lose_node(rank)
        elif what < 0.93 and rank not in lost:
            lost.add(rank)
            told.box.lose_node(rank)
        told.box.set_present(0b111 & ~sum(1 << r for r in ended), formed=True)
        for one in (1, 2):
            assert told.box.ended[one] <= (one in ended)
    for one in open_:
        told.box.ready(one, one.source)
    told.fetch()
    for rank in (1, 2):
        got = [oid for source, oid in told.got if source == rank]
        whole = [one.oid for one in sent[rank]]
        assert got == whole[: len(got)]
        assert rank in lost or got == whole
        assert told.box.ended[rank] == (rank in ended)
        assert bool(told.box.gone >> rank & 1) == (rank in ended)
