"""Objects of one host in the hands of another: holds, values, failures, deaths."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp.errors import ObjectLostError
from tests.support.node_hosts import BIG, Network, Side, assert_nothing_kept, remote_hold
from tests.support.shm_host import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


@pytest.fixture
def owner(network: Network) -> Side:
    return network.nodes[0]


@pytest.fixture
def away(network: Network) -> Side:
    return network.nodes[1]


def test_small_value_is_sent_with_the_reply(network: Network, owner: Side, away: Side) -> None:
    object_id, mine = owner.put({"a": [1, 2, 3]})
    (hold,) = remote_hold(network, away, object_id)
    assert away.value(hold) == {"a": [1, 2, 3]}
    del mine
    network.pump()
    owner.party.collect()
    assert owner.node.state(ids.unpack_id(object_id)[1]) != 0  # the other host holds it
    del hold
    assert_nothing_kept(network)


def test_import_is_answered_after_the_owner_has_counted_it(
    network: Network, owner: Side, away: Side
) -> None:
    object_id, mine = owner.put(1)
    found = away.hold(object_id)
    assert found == []
    assert network.deliver(away.host_id, owner.host_id)
    del mine  # the importer's hold is counted now
    owner.party.collect()
    network.pump()
    assert away.value(found[0]) == 1
    found.clear()
    assert_nothing_kept(network)


def test_large_value_is_fetched_on_demand(network: Network, owner: Side, away: Side) -> None:
    object_id, mine = owner.put(BIG)
    (hold,) = remote_hold(network, away, object_id)
    assert away.value(hold) == "SPILLED"
    heard: list[int] = []
    oid = away.imports.by_object[object_id].oid
    assert away.remote_objects.want(oid, lambda: heard.append(1))
    assert away.remote_objects.want(oid, lambda: heard.append(2))
    assert len(away.fetching) == 1
    away.bring()
    assert heard == [1, 2]
    assert (away.value(hold) == BIG).all()
    del mine, hold
    assert_nothing_kept(network)


@pytest.mark.parametrize("failed", [False, True])
def test_payload_without_space_stays_with_the_owner(
    network: Network, owner: Side, away: Side, failed: bool
) -> None:
    """A value stays where it is until it is asked for; an error is told in a few words."""
    object_id, mine = owner.pending()
    (hold,) = remote_hold(network, away, object_id)
    owner.finish(object_id, ValueError("x" * 1000) if failed else "x" * 1000)
    lease, away.results.lease = away.results.lease, lambda *about: None  # type: ignore[method-assign]
    owner.poll()
    network.pump()
    away.results.lease = lease  # type: ignore[method-assign]
    if failed:
        found = away.value(hold)
        assert isinstance(found, ObjectLostError)
        assert "there is no space for its error on this host" in str(found)
    else:
        assert away.value(hold) == "SPILLED"
        assert away.remote_objects.want(hold.oid, lambda: None)
        away.bring()
        assert away.value(hold) == "x" * 1000
    del mine, hold
    assert_nothing_kept(network)


def test_two_importers_on_one_host_share_a_header(
    network: Network, owner: Side, away: Side
) -> None:
    object_id, mine = owner.put("x")
    first, second = away.hold(object_id), away.hold(object_id)
    network.pump()
    assert first[0].oid == second[0].oid
    assert len(owner.exports.exports[ids.unpack_id(object_id)[1]].importers) == 1
    first.clear()
    network.pump()
    assert away.value(second[0]) == "x"
    del mine
    second.clear()
    assert_nothing_kept(network)


def test_import_released_before_the_reply_can_be_repeated(
    network: Network, owner: Side, away: Side
) -> None:
    object_id, mine = owner.put("x")
    for _ in range(5):
        found = away.hold(object_id)
        network.deliver(away.host_id, owner.host_id)
        found.clear()
        again = away.hold(object_id)
        network.pump()
        assert away.value(again[0]) == "x"
        again.clear()
        found.clear()
    del mine
    assert_nothing_kept(network)


@pytest.mark.parametrize("outcome", [7, ValueError("no"), BIG[:50]])
def test_pending_import_receives_the_result(
    network: Network, owner: Side, away: Side, outcome: object
) -> None:
    object_id, mine = owner.pending()
    (hold,) = remote_hold(network, away, object_id)
    assert away.value(hold) == "CLAIMED"
    owner.finish(object_id, outcome)
    network.pump()
    got = away.value(hold)
    if isinstance(outcome, Exception):
        assert isinstance(got, ValueError)
        assert got.args == ("no",)
    else:
        assert np.array_equal(got, outcome)  # type: ignore[arg-type]
    del mine, hold
    assert_nothing_kept(network)


def test_import_of_a_cancelled_task_raises_cancelled_error(
    network: Network, owner: Side, away: Side
) -> None:
    object_id, mine = owner.pending()
    (hold,) = remote_hold(network, away, object_id)
    oid = ids.unpack_id(object_id)[1]
    assert owner.tasks.cancel(oid, True) == 2
    network.pump()
    assert isinstance(away.value(hold), CancelledError)
    assert owner.tasks.settle(oid)
    del mine, hold
    assert_nothing_kept(network)


def test_import_of_a_freed_object_raises_object_lost_error(
    network: Network, owner: Side, away: Side
) -> None:
    object_id, mine = owner.put(1)
    del mine
    owner.party.collect()
    (hold,) = remote_hold(network, away, object_id)
    assert isinstance(away.value(hold), ObjectLostError)
    del hold
    assert_nothing_kept(network)


def test_import_from_an_unknown_host_raises_object_lost_error(network: Network, away: Side) -> None:
    (hold,) = remote_hold(network, away, ids.pack_id(999, 1 << 32))
    assert isinstance(away.value(hold), ObjectLostError)
    del hold
    assert_nothing_kept(network)


def test_object_deleted_by_an_importer_is_deleted_everywhere(
    network: Network, owner: Side, away: Side
) -> None:
    object_id, mine = owner.put(1)
    (hold,) = remote_hold(network, away, object_id)
    away.party.delete(hold.oid)
    away.imports.drop(hold.oid)
    network.pump()
    assert owner.value(mine) == "DELETED"
    assert away.value(hold) == "DELETED"
    del mine, hold
    assert_nothing_kept(network)


@pytest.mark.parametrize("chars", [50_000, 300_000])
def test_imported_error_of_any_size_keeps_its_type(
    network: Network, owner: Side, away: Side, chars: int
) -> None:
    object_id, hold = owner.pending()
    found = away.hold(object_id)
    owner.finish(object_id, KeyError("begins" + "k" * chars + "ends", 3))
    network.pump()
    error = away.value(found[0])
    assert isinstance(error, KeyError)
    text, number = error.args
    assert (text[:6], text[-4:], number) == ("begins", "ends", 3)
    del found, hold
    assert_nothing_kept(network)


def test_imported_error_without_space_is_object_lost_error(
    network: Network, away: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away.results, "lease", lambda nbytes, failed=False: None)
    (hold,) = remote_hold(network, away, ids.pack_id(999, 1 << 32))
    assert isinstance(away.value(hold), ObjectLostError)
    del hold
    assert_nothing_kept(network)


def test_owner_death_fails_pending_and_unfetched_imports(
    network: Network, owner: Side, away: Side
) -> None:
    pending, mine = owner.pending()
    big, theirs = owner.put(BIG)
    (first,), (second,) = remote_hold(network, away, pending), remote_hold(network, away, big)
    asked = away.hold(owner.put(3)[0])  # not answered yet
    heard: list[int] = []
    away.remote_objects.want(second.oid, lambda: heard.append(1))
    network.lose(owner)
    network.settle()
    for hold in (first, second, asked[0]):
        error = away.value(hold)
        assert isinstance(error, ObjectLostError)
    assert heard == [1]
    assert "h0" in str(away.value(second))
    del first, second, hold, mine, theirs
    asked.clear()
    assert_nothing_kept(network)


def test_importer_death_removes_its_exports(network: Network, owner: Side, away: Side) -> None:
    object_id, mine = owner.put(1)
    found = remote_hold(network, away, object_id)
    network.lose(away)
    assert not owner.exports.exports
    del mine
    assert_nothing_kept(network)
    assert found


def test_imports_in_random_order_leave_nothing(network: Network) -> None:
    """Every host imports, reads, lets go and takes again, while lines deliver as they like."""
    rng = np.random.default_rng(5)
    objects = [(side, *side.put((side.number, n))) for side in network.nodes for n in range(6)]
    held: list[tuple[Side, list[object], tuple[int, int]]] = []
    for _ in range(3000):
        side = network.nodes[rng.integers(3)]
        match rng.integers(4):
            case 0:
                owner, object_id, _ = objects[rng.integers(len(objects))]
                n = int(np.flatnonzero([o[1] == object_id for o in objects])[0]) % 6
                held.append((side, side.hold(object_id), (owner.number, n)))
            case 1 if held:
                held.pop(int(rng.integers(len(held))))
            case 2 if network.lines:
                lines = list(network.lines)
                network.deliver(*lines[rng.integers(len(lines))])
            case _:
                side.poll()
        for holder, found, value in held[-3:]:
            if found:
                assert holder.value(found[0]) == value
    network.pump()
    for holder, found, value in held:
        assert holder.value(found[0]) == value
    held.clear()
    objects.clear()
    found = []
    assert_nothing_kept(network)


@pytest.mark.parametrize("held", [False, True])
def test_ref_inside_an_object_of_a_dead_process_stays_valid(
    network: Network, owner: Side, away: Side, held: bool
) -> None:
    """Its node holds the other host's object from then on, as long as the outer one stays."""
    other = owner.put(0)  # or the object would have the same number on both hosts
    object_id, mine = owner.put(np.arange(10_000))
    (inner,) = remote_hold(network, away, object_id)
    outer_id, outer = away.put({"x": ObjectRef(object_id, inner)})
    found = remote_hold(network, owner, outer_id) if held else []
    del mine
    away.worker_exited(away.party.slot)  # with what the process held
    del inner, outer

    def settle() -> None:
        for _ in range(3):
            network.pump()
            away.sweeper.collect()
            owner.party.collect()
        network.pump()

    settle()
    assert (owner.node.state(ids.unpack_id(object_id)[1]) == STATE["SEALED"]) == held
    found.clear()
    settle()
    assert not owner.exports.exports
    del other
