"""New owners: of very many objects, in messages that fit into frames; and after a new manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._planner import owners
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol.codec import FRAME_BYTES_MAX, encode
from hoplite_mp._protocol.copies import OrphansReported, OwnersReassigned
from hoplite_mp._protocol.membership import ReportedOwners
from hoplite_mp._protocol.messages import (
    NodeJoined,
    NodeLost,
    ObjectDeleted,
    OwnerQuery,
    OwnerReport,
)

if TYPE_CHECKING:
    from hoplite_mp._planner.step_result import Send

NUMBER_BYTES, HEAD_BYTES = 5, 64


def named(nodes: int, count: int) -> list[Send]:
    """What is told when `nodes` others have that many objects of a node that dies."""
    planner = Planner()
    for node in range(nodes + 1):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    planner.step(NodeLost(0, 0), 0.0)
    objects = tuple((70).to_bytes(8, "little") + at.to_bytes(8, "little") for at in range(count))
    sends: list[Send] = []
    for node in range(1, nodes + 1):
        numbers = tuple(range(1 << 30, (1 << 30) + count))
        report = OrphansReported(node, 0, objects, numbers, tuple(range(count)))
        encode(report)
        sends += planner.step(report, 0.0).sends
    return [one for one in sends if isinstance(one[1], OwnersReassigned)]


def test_every_message_fits_into_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many objects there are, and hosts that hold them."""
    assert NUMBER_BYTES * owners.NUMBERS_MAX < FRAME_BYTES_MAX // 2
    monkeypatch.setattr(owners, "NUMBERS_MAX", 1000)
    for nodes, count in ((1, 1000), (3, 300), (40, 10)):
        for _, message in named(nodes, count):
            assert len(encode(message)) < NUMBER_BYTES * 1000 + HEAD_BYTES


@pytest.mark.parametrize("numbers_max", [1, 40, 1000])
def test_split_messages_equal_one_message(
    monkeypatch: pytest.MonkeyPatch, numbers_max: int
) -> None:
    (whole, *_) = [message for node, message in named(3, 40) if node == 1]
    assert isinstance(whole, OwnersReassigned)
    assert not whole.more
    monkeypatch.setattr(owners, "NUMBERS_MAX", numbers_max)
    parts = [message for node, message in named(3, 40) if node == 1]
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]  # type: ignore[union-attr]
    assert len(parts) == {1: 40, 40: 20, 1000: 1}[numbers_max]
    for name in ("objects", "owners", "counted", "copies"):
        assert [one for part in parts for one in getattr(part, name)] == [*getattr(whole, name)]


def test_both_reports_to_a_new_manager_count() -> None:
    """Seed 500782: a node met an object of a dead host between its first report to a new manager
    and its admission by it. Nothing answered its second report, and the node waited for ever."""
    planner = Planner()
    for node in range(3):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    planner.membership.lose(0)
    host_id = (70).to_bytes(8, "little")
    first, later, moved = (host_id + at.to_bytes(8, "little") for at in (1, 2, 3))
    planner.owners.restore(
        [ReportedOwners(1, (moved,), (1,))],
        [
            OrphansReported(1, 0, (first, moved), (5, 6), (0, 1)),
            OrphansReported(2, 0, (), (), ()),
        ],
    )
    assert planner.owners.report(OrphansReported(1, 0, (first, later), (7, 8), (0, 1))) == []
    sends = planner.owners.report(OrphansReported(2, 0, (later,), (9,), ()))
    assert sends == [
        (
            1,
            OwnersReassigned(
                0, (first, moved, later), (1, 1, 1), ((1, 7), (1, 6), (1, 8, 2, 9)), ((), (), ())
            ),
        ),
        (2, OwnersReassigned(0, (later,), (1,), ((),), ((),))),
    ]


def test_object_freed_between_two_reports_gets_no_owner() -> None:
    """Seed 600295: the owner had freed it after its first report to a new manager, which named it
    again at the end of the round, and would never have heard that the object is gone."""
    planner = Planner()
    for node in range(2):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    planner.membership.lose(0)
    freed = (70).to_bytes(8, "little") + bytes(8)
    planner.owners.restore(
        [ReportedOwners(1, (freed,), (1,))], [OrphansReported(1, 0, (freed,), (0,), (0,))]
    )
    planner.step(ObjectDeleted(freed), 0.0)
    planner.owners.report(OrphansReported(1, 0))
    assert not planner.owners.named


def test_object_freed_without_a_manager_gets_no_owner() -> None:
    """Seed 2023921: another node still had a replica, and told the next manager who the owner is,
    which would never say again that the object is gone."""
    planner = Planner()
    for node in range(3):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    planner.membership.lose(0)
    freed, kept, told = ((70).to_bytes(8, "little") + at.to_bytes(8, "little") for at in range(3))
    planner.owners.restore(
        [ReportedOwners(2, (freed, kept, told), (1, 1, 1)), ReportedOwners(1, (kept,), (1,))],
        [
            OrphansReported(2, 0, (freed, kept, told), (0, 0, 0), (0, 1, 2)),
            OrphansReported(1, 0, (told,), (0,), (0,)),  # it has not heard that it is the owner
        ],
    )
    for node in (1, 2):
        planner.owners.report(OrphansReported(node, 0))
    assert planner.owners.named == {kept: 1, told: 1}


@pytest.mark.parametrize("told", ["before", "after"])
def test_object_freed_by_a_dead_owner_gets_an_owner_among_its_holders(told: str) -> None:
    """Seed 1206283: the owner had lost contact with the holder, and said that nobody holds the
    object; a new manager read that after it had heard of the owner's death. told: when the manager
    hears of the death, before or after it has begun."""
    planner = Planner()
    for node in range(3):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    planner.membership.lose(0)
    held = (70).to_bytes(8, "little") + bytes(8)
    if told == "before":
        planner.membership.lose(1)
    planner.owners.restore(
        [ReportedOwners(1, (held,), (1,))], [OrphansReported(2, 1, (held,), (5,), (0,))]
    )
    if told == "after":
        planner.step(NodeLost(1, 0), 0.0)
    planner.step(ObjectDeleted(held), 0.0)
    planner.owners.report(OrphansReported(2, 1, (held,), (5,), (0,)))
    planner.owners.report(OrphansReported(2, 0))
    assert planner.owners.named == {held: 2}


@pytest.mark.parametrize("lost", [(0,), (0, 1)])
def test_query_about_a_host_unknown_to_a_new_manager_waits_for_reports(
    lost: tuple[int, ...],
) -> None:
    """Seed 902930: the host had died before the manager was started again, so its number was known
    from reports about it alone. A node that had met the object in between was told that it is
    lost, although others had reported it whole. lost: numbers of the dead, about all of which
    reports are awaited."""
    planner = Planner()
    nodes = (2, 3)
    for node in range(2):
        planner.step(NodeJoined(80 + node, 0, 2), 0.0)
        planner.membership.lose(node)
    for node in nodes:
        planner.step(NodeJoined(80 + node, 0, 2), 0.0)
    kept = (70).to_bytes(8, "little") + bytes(8)
    planner.owners.restore(
        [],
        [OrphansReported(2, one, (kept,), (5,), (0,)) for one in lost if not one]
        + [OrphansReported(2, one) for one in lost if one],
    )
    asked = OwnerQuery(3, kept)
    assert not planner.step(asked, 0.0).sends
    sends: list[Send] = []
    for one in reversed(lost):
        for node in nodes:
            objects = ((kept,), (5,), (0,)) if (node, one) == (2, 0) else ((), (), ())
            sends += planner.step(OrphansReported(node, one, *objects), 0.0).sends
    assert [one for one in sends if isinstance(one[1], OwnerReport)] == [(3, OwnerReport(kept, 2))]
    assert planner.step(asked, 0.0).sends == ((3, OwnerReport(kept, 2)),)


def test_query_about_an_object_of_an_unknown_host_is_answered_lost() -> None:
    planner = Planner()
    planner.step(NodeJoined(80, 0, 2), 0.0)
    gone = (70).to_bytes(8, "little") + bytes(8)
    told = planner.step(OwnerQuery(0, gone), 0.0).sends
    assert told == ((0, OwnerReport(gone, owners.NOBODY)),)


@pytest.mark.parametrize("first", [0, 1])
def test_objects_of_a_dead_new_owner_are_decided_after_its_holders_reports(first: int) -> None:
    """Seed 1871176: the owner that a former manager had named was dead, too. The round about the
    first owner gave the object, an actor's identity, to a node that held only a handle, so nobody
    began the actor, and its name was never free. first: the owner whose round ends first."""
    planner = Planner()
    for node in range(4):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    for node in (0, 1):
        planner.membership.lose(node)
    actor = (70).to_bytes(8, "little") + bytes(8)
    reports = [
        OrphansReported(2, 0, (actor,), (5,), (0,)),  # does not know of the owner between
        OrphansReported(3, 1, (actor,), (0,), (0,), (0, 1)),
        OrphansReported(3, 0),
        OrphansReported(2, 1),
    ]
    planner.owners.restore([ReportedOwners(3, (actor,), (1,))], reports[:2])
    ended: list[tuple[int, dict[bytes, int]]] = []
    planner.owners.concluded = lambda lost, actors: ended.append((lost, actors))
    sends: list[Send] = []
    for one in sorted(reports, key=lambda report: report.lost != first):
        sends += planner.owners.report(one)
    assert planner.owners.named == {actor: 3}
    assert ended == [(1, {actor: 3}), (0, {})]
    assert sends == [
        (3, OwnersReassigned(1, (actor,), (3,), ((2, 5),), ((2,),))),
        (2, OwnersReassigned(0, (actor,), (3,), ((),), ((),))),
    ]


def test_dead_node_is_not_named_owner_by_an_earlier_round() -> None:
    """The first owner and the later one are dead. The round about the later one names a node, which
    dies before the round about the first one has ended; that one has its report from the other."""
    planner = Planner()
    for node in range(5):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    for node in (0, 1):
        planner.membership.lose(node)
    one = (70).to_bytes(8, "little") + bytes(8)
    # 0 was the first owner, 1 the later one. 2 and 4 know the first alone, 3 the later one.
    planner.owners.restore(
        [ReportedOwners(3, (one,), (1,))],
        [
            OrphansReported(2, 0, (one,), (5,), (0,)),
            OrphansReported(4, 0, (one,), (6,), ()),
            OrphansReported(3, 1, (one,), (7,), (0,)),
            OrphansReported(3, 0),
            OrphansReported(2, 1),
            OrphansReported(4, 1),
        ],
    )
    for message in (
        OrphansReported(2, 1),
        OrphansReported(3, 1, (one,), (7,), (0,)),
        OrphansReported(4, 1),  # the round about 1 ends: 2 is named
        OrphansReported(2, 0, (one,), (5,), (0,)),
        OrphansReported(3, 0),
        NodeLost(2, 0),
        OrphansReported(4, 0, (one,), (6,), ()),
        OrphansReported(4, 2),
        OrphansReported(3, 2, (one,), (7,), (0,)),
    ):
        planner.step(message, 0.0)
    assert planner.owners.named == {one: 3}
