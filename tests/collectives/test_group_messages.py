"""Messages from one member of a Group to another, on one host: order, deaths, room, waiting."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError, StoreFullError
from tests.support.group_members import in_threads
from tests.support.interruptions import no_collection
from tests.support.values import same_value, samples
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster, Group


class Pair:
    """Two members whose methods one thread calls: sends are buffered, so it never waits."""

    def __init__(self, cluster: Cluster, name: str, **kwargs: Any) -> None:
        self.a = cluster.group(name, 2, 0, **{"timeout": 20, **kwargs})
        self.b = cluster.group(name, 2, 1, **{"timeout": 20, **kwargs})

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(cluster, request.node.name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def carrier(cluster: Cluster) -> Iterator[Pair]:
    """A pair for many tests."""
    made = Pair(cluster, "carrier")
    yield made
    made.close()


@pytest.mark.parametrize("name", samples())
def test_every_value_is_carried_as_itself(carrier: Pair, name: str) -> None:
    carrier.a.send(samples()[name], 1)
    assert same_value(samples()[name], carrier.b.recv(0))


def test_messages_of_a_source_do_not_overtake_each_other(pair: Pair) -> None:
    for at in range(200):
        pair.a.send((at, np.zeros(at * 500)), 1, tag=at % 3)
    for tag in (2, 0, 1):
        got = [pair.b.recv(0, tag)[0] for _ in range(tag, 200, 3)]
        assert got == list(range(tag, 200, 3))
    assert pair.b.probe(timeout=0) is None


def test_any_source_and_any_tag(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        if group.rank:
            group.send(f"from {group.rank}", 0, tag=group.rank)
            return None
        found = sorted(group.recv(with_source=True) for _ in range(3))
        return found

    found = in_threads(cluster, "any", 4, body)
    assert found[0] == [(f"from {rank}", rank) for rank in (1, 2, 3)]


def test_a_model_of_what_is_received(pair: Pair) -> None:
    """Random sends and receives of both members, against lists."""
    dice = random.Random(5)
    groups = pair.a, pair.b
    boxes: list[list[tuple[int, int, int]]] = [[], []]
    for step in range(400):
        me = dice.randrange(2)
        if dice.random() < 0.55:
            to, tag = dice.randrange(2), dice.randrange(3)
            groups[me].send((step, np.ones(dice.choice((1, 40, 30_000)))), to, tag)
            boxes[to].append((me, tag, step))
            continue
        source, tag_ = dice.choice((None, 0, 1)), dice.choice((None, 0, 1, 2))
        wanted = [m for m in boxes[me] if source in (None, m[0]) and tag_ in (None, m[1])]
        seen = groups[me].probe(source, tag_, timeout=0)
        if not wanted:
            assert seen is None
            continue
        assert seen == wanted[0][:2]
        value, sender = groups[me].recv(source, tag_, with_source=True)
        assert (sender, value[0]) == (wanted[0][0], wanted[0][2])
        boxes[me].remove(wanted[0])


def test_sends_do_not_wait_for_each_other(cluster: Cluster) -> None:
    """All send to all before anybody receives: rendezvous would hang here."""

    def body(group: Group) -> Any:
        for to in range(group.size):
            group.send(np.full(200_000, group.rank), to)
        return [int(group.recv(source).max()) for source in range(group.size)]

    assert in_threads(cluster, "all", 4, body) == [[0, 1, 2, 3]] * 4


def test_what_was_sent_is_a_copy_and_what_arrives_is_ones_own(pair: Pair, cluster: Cluster) -> None:
    for made in (np.zeros(50_000), cluster.empty(50_000)):
        made[:] = 1
        pair.a.send(made, 1)
        made[:] = 2
        pair.a.send(made, 1)
        first, second = pair.b.recv(), pair.b.recv()
        assert (first.max(), second.max()) == (1, 2)
        first[:] = 3
        assert second.max() == made.max() == 2


def test_sendrecv_in_a_ring(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        return [group.sendrecv((at, group.rank), right, left, tag=at) for at in range(5)]

    found = in_threads(cluster, "ring", 3, body)
    assert found == [[(at, (rank - 1) % 3) for at in range(5)] for rank in range(3)]


def test_messages_pass_by_a_call_that_is_under_way(pair: Pair) -> None:
    """The call of one member ends only after the other has had a message from it."""
    waiting = pair.a.allreduce_async(np.ones(3))
    pair.a.send("while it waits", 1)
    assert pair.b.recv(0) == "while it waits"
    assert pair.b.allreduce(np.ones(3)).tolist() == waiting.result(20).tolist() == [2] * 3


def test_receives_are_served_in_the_order_in_which_they_were_made(pair: Pair) -> None:
    early = [pair.b.recv_async(0, tag) for tag in (None, 1, None)]
    other = pair.b.recv_async(0, 7, with_source=True)
    for at, tag in enumerate((1, 1, 0, 7)):
        pair.a.send(at, 1, tag)
    assert [future.result(20) for future in early] == [0, 1, 2]
    assert other.result(20) == (3, 0)


def test_a_receive_that_is_cancelled_takes_nothing(pair: Pair) -> None:
    gone, stays = pair.b.recv_async(0), pair.b.recv_async(0)
    assert gone.cancel()
    pair.a.send("for the second", 1)
    assert stays.result(20) == "for the second"
    with pytest.raises(
        HopliteTimeoutError, match=r"from rank 0 with tag 3 has not arrived within 0.\d+ s"
    ):
        pair.b.recv_async(0, 3, timeout=0.05).result(20)


def test_a_send_to_oneself(pair: Pair) -> None:
    pair.a.send(1, 0)
    assert pair.a.recv(0) == 1
    later = pair.a.recv_async(0)
    pair.a.send(2, 0)
    assert later.result(20) == 2
    with pytest.raises(RuntimeError, match="only this rank could send it"):
        pair.a.recv(0)


def test_mistakes(pair: Pair) -> None:
    for wrong, error in ((2, ValueError), (-1, ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match="to="):
            pair.a.send(1, wrong)
        with pytest.raises(error, match="source="):
            pair.a.recv(wrong)
    for wrong, error in ((-1, ValueError), (1 << 31, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="tag="):
            pair.a.send(1, 1, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot pickle"):
        pair.a.send(threading.Lock(), 1)
    with pytest.raises(TypeError, match="timeout="):
        pair.b.recv(timeout="1")  # type: ignore[arg-type]
    with pytest.raises(HopliteTimeoutError, match="a message from any rank has not arrived"):
        pair.b.recv(timeout=0.02)
    assert pair.b.probe(timeout=0.02) is None
    pair.a.send("still good", 1)
    assert pair.b.recv() == "still good"


def test_a_value_that_cannot_be_read_here_does_not_stand_in_the_way(pair: Pair) -> None:
    pair.a.send(Unreadable(), 1)
    pair.a.send("next", 1)
    with pytest.raises(ZeroDivisionError):
        pair.b.recv()
    assert pair.b.recv() == "next"


class Unreadable:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_refs_inside_stay_held(cluster: Cluster, pair: Pair) -> None:
    ref = cluster.put(np.full(100_000, 7))
    pair.a.send({"ref": ref}, 1)
    del ref
    assert cluster.get(pair.b.recv()["ref"]).max() == 7


# -- leaving and dying ----------------------------------------------------------------------------


def test_who_has_left_is_told_and_what_it_sent_is_received_first(pair: Pair) -> None:
    for at in range(3):
        pair.a.send((at, np.zeros(at * 100_000)), 1)
    pair.a.close()
    assert [pair.b.recv(0)[0] for _ in range(2)] == [0, 1]
    assert pair.b.recv()[0] == 2
    for source in (0, None):
        with pytest.raises(PeerLostError, match="left or died"):
            pair.b.recv(source)
        with pytest.raises(PeerLostError, match="left or died"):
            pair.b.recv_async(source).result(20)
    with pytest.raises(PeerLostError, match="rank 0 has left or died"):
        pair.b.send(1, 0)
    with pytest.raises(ClosedError):
        pair.a.send(1, 1)


def test_a_receive_that_waits_learns_of_the_death(cluster: Cluster, tmp_path: Path) -> None:
    """All that `send` has returned for comes first, whatever its size."""

    def member(rank: int, folder: Path) -> Any:
        group = hoplite_mp.current().group("dies", 3, rank)
        if rank == 0:
            for at in range(50):
                group.send((at, np.zeros(at % 5 * 20_000)), 1 + at % 2)
            (folder / "pid").write_text(str(os.getpid()))
            group.recv(tag=9)
        found = []
        try:
            while True:
                found.append(group.recv(0)[0])
        except PeerLostError:
            return found

    with hoplite_mp.Cluster(workers=3, memory="256MiB") as own:
        tasks = [own.options(retries=0).submit(member, rank, tmp_path) for rank in range(3)]
        path = tmp_path / "pid"
        os.kill(int(eventually(lambda: path.exists() and path.read_text())), signal.SIGKILL)
        found = [tasks[rank].result(30) for rank in (1, 2)]
        assert found == [list(range(0, 50, 2)), list(range(1, 50, 2))]


def test_kills_at_random_instants(tmp_path: Path) -> None:
    """What is received of a dead member is a prefix of what it has sent, at least what it knows."""

    def member(rank: int, turn: int, folder: Path) -> Any:
        group = hoplite_mp.current().group(f"turn {turn}", 2, rank)
        if rank == 0:
            (folder / f"pid{turn}").write_text(str(os.getpid()))
            for at in range(100_000):
                group.send((at, np.zeros(10_000 if at % 7 == 0 else 1)), 1)
                (folder / f"sent{turn}").write_text(str(at))
        found = []
        try:
            while True:
                found.append(group.recv()[0])
        except PeerLostError:
            return found

    with hoplite_mp.Cluster(workers=2, memory="256MiB") as own:
        for turn in range(4):
            tasks = [
                own.options(retries=0).submit(member, rank, turn, tmp_path) for rank in range(2)
            ]
            sent = tmp_path / f"sent{turn}"
            eventually(lambda s=sent: s.exists() and int(s.read_text() or 0) > 20)  # type: ignore[misc]
            time.sleep(random.Random(turn).random() * 0.01)  # the instant is what is tried out
            os.kill(int((tmp_path / f"pid{turn}").read_text()), signal.SIGKILL)
            found = tasks[1].result(30)
            assert found == list(range(len(found)))
            assert len(found) > int(sent.read_text() or 0)


def test_a_replacement_begins_with_an_empty_box(pair: Pair, cluster: Cluster) -> None:
    pair.a.send("for who was here before", 1)
    pair.b.send("of who was here before", 0)
    pair.b.close()
    new = cluster.group(pair.a.name, 2, 1, timeout=20)
    eventually(lambda: new.probe(timeout=0) is None)
    pair.a.send("for the new one", 1)
    assert new.recv(0) == "for the new one"
    new.send("of the new one", 0)
    assert pair.a.recv(1) == "of who was here before"
    assert pair.a.recv(1) == "of the new one"
    new.close()


def test_closing_ends_receives_that_wait(pair: Pair) -> None:
    later = pair.b.recv_async(0)
    pair.b.close()
    with pytest.raises(ClosedError, match="has left"):
        later.result(20)


def test_ctrl_c_takes_no_message(pair: Pair) -> None:
    """Interrupted while it waits; and again and again while messages come."""
    main = threading.main_thread().ident
    assert main is not None
    signal_at = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))

    def receives() -> None:
        signal_at.start()
        pair.b.recv(0)

    with no_collection(), pytest.raises(KeyboardInterrupt):
        receives()
    pair.a.send("later", 1)
    assert pair.b.recv(0) == "later"


def test_interrupts_while_messages_come(pair: Pair) -> None:
    """None comes twice or out of order; an interrupt costs at most the one that it interrupts."""
    main, count, interrupts = threading.get_ident(), 300, 30
    armed = over = False

    def stop(*_: Any) -> None:
        nonlocal armed
        if armed and not over:
            armed = False
            raise InterruptedOnce

    def interrupt() -> None:
        for _ in range(interrupts):
            time.sleep(0.003)
            signal.pthread_kill(main, signal.SIGUSR1)

    def send_all() -> None:
        nonlocal over
        for at in range(count):
            pair.a.send(at, 1)
        threads[1].join()
        over = True  # the last message is not interrupted
        pair.a.send(count, 1)

    before = signal.signal(signal.SIGUSR1, stop)
    threads = [
        threading.Thread(target=send_all),
        threading.Thread(target=interrupt),
    ]
    for thread in threads:
        thread.start()
    found: list[int] = []
    try:
        with no_collection():
            while not found or found[-1] < count:
                with contextlib.suppress(InterruptedOnce):
                    armed = True
                    found.append(pair.b.recv(0, timeout=60))
                    armed = False
            armed = False
    finally:
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert found == sorted(set(found))
    assert len(found) > count - interrupts


class InterruptedOnce(Exception):
    """What the handler raises."""


# -- room -----------------------------------------------------------------------------------------


def used(cluster: Cluster) -> int:
    return int(cluster.stats()["bytes_used"])


@pytest.fixture
def small() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=0, memory="24MiB") as made:
        yield made


@pytest.fixture
def impatient() -> Iterator[Cluster]:
    """One whose full store is an error soon."""
    config = hoplite_mp.Config(put_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, memory="24MiB", config=config) as made:
        yield made


def test_more_than_the_store_holds_is_spilled(small: Cluster) -> None:
    pair = Pair(small, "spilled")
    for at in range(20):
        pair.a.send(np.full(4 << 20, at, np.uint8), 1)
    assert small.stats()["bytes_spilled"] > 40 << 20
    for at in range(20):
        got = pair.b.recv(0)
        assert (got.min(), got.max(), len(got)) == (at, at, 4 << 20)
        del got
    eventually(lambda: small.stats()["bytes_spilled"] == 0, "the spill file is empty")
    pair.close()


def test_a_message_larger_than_the_store(small: Cluster) -> None:
    pair = Pair(small, "too large")
    with pytest.raises(StoreFullError, match="put of 48"):
        pair.a.send(np.zeros(48 << 20, np.uint8), 1)
    pair.a.send("still good", 1)
    assert pair.b.recv() == "still good"
    pair.close()


def test_a_full_store_keeps_the_message(impatient: Cluster) -> None:
    """What finds no room at the receiver is received when there is room."""
    pair = Pair(impatient, "full")
    pair.a.send(np.arange(1 << 20), 1)
    held = []
    with contextlib.suppress(StoreFullError):  # what is pinned is not spilled
        while True:
            held.append(impatient.get(impatient.put(np.ones(1 << 20, np.uint8))))
    with pytest.raises(StoreFullError):
        pair.b.recv(0)
    held.clear()
    eventually(lambda: used(impatient) < 12 << 20, "there is space")
    assert (pair.b.recv(0) == np.arange(1 << 20)).all()
    pair.close()


@pytest.mark.parametrize("who", ["receiver", "both"])
def test_what_nobody_will_read_is_freed(small: Cluster, who: str) -> None:
    pair = Pair(small, f"unread {who}")
    pair.a.send(1, 1)
    assert pair.b.recv() == 1
    before = used(small)
    for _ in range(4):
        pair.a.send(np.zeros(3 << 20, np.uint8), 1)
    assert used(small) > before + (11 << 20)
    pair.b.close()
    if who == "both":
        pair.a.close()
    eventually(lambda: used(small) <= before + (1 << 20), "all is freed")
    pair.close()


def test_what_was_received_is_freed_at_once(small: Cluster) -> None:
    pair = Pair(small, "freed")
    before = used(small)
    for _ in range(3):
        pair.a.send(np.zeros(6 << 20, np.uint8), 1)
        got = pair.b.recv()
        assert len(got) == 6 << 20
        del got
        eventually(lambda: used(small) <= before + (1 << 20), "it is freed")
    pair.close()


def test_the_group_is_waited_for(cluster: Cluster) -> None:
    """As by the first call; the deadline of a receive counts from the beginning."""
    with cluster.group("waited", 2, 0) as alone:
        with pytest.raises(
            HopliteTimeoutError, match=r"1 of 2 members joined within timeout=0\.1 s"
        ):
            alone.recv(timeout=0.1)
        sent = threading.Thread(target=alone.send, args=("early", 1))
        sent.start()
        with cluster.group("waited", 2, 1, timeout=20) as other:
            assert other.recv() == "early"
        sent.join()


def test_each_receive_waits_for_a_whole_group_as_long_as_it_says() -> None:
    """The limit of the first `recv_async` was that of all later ones."""
    with hoplite_mp.Cluster(workers=0) as c:
        g = c.group("never whole", size=2, rank=0, timeout=0.2)
        assert g.probe(timeout=0) is None
        with pytest.raises(HopliteTimeoutError):
            g.recv_async().result(30)
        later = g.recv_async(timeout=20)
        with pytest.raises(TimeoutError):
            later.result(0.25)
        assert not later.done()
        later.cancel()
        begun = time.monotonic()
        with pytest.raises(HopliteTimeoutError):
            g.barrier()
        assert time.monotonic() - begun > 0.19
        g.close()


def test_a_timeout_without_end() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        g = c.group("alone", size=1, timeout=float("inf"))
        assert g.allreduce(1) == 1
        futures = [c.submit(abs, -3)]
        assert [f.result() for f in hoplite_mp.as_completed(futures, timeout=1e11)] == [3]
        assert list(c.map(abs, [-1], ordered=False, timeout=float("inf"))) == [1]
