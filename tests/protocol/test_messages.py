"""An illegal message cannot be made, and the error names the field."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from hoplite_mp._protocol import fields
from hoplite_mp._protocol import messages as m
from tests.support.messages import ID, MESSAGES, SAMPLES, WHOLE


def sample(kind: type) -> Any:
    (one,) = (message for message in SAMPLES if type(message) is kind)
    return one


def test_samples_include_every_message() -> None:
    assert {type(message) for message in SAMPLES} == set(MESSAGES)
    assert not set(get_args(m.NodeToManager)) & set(get_args(m.ManagerToNode))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_messages_are_frozen_and_compared_by_value(message: Any) -> None:
    if not message.__struct_fields__:
        assert message == type(message)()
        return
    name = message.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(message, name, 0)
    assert message == type(message)(*(getattr(message, f) for f in message.__struct_fields__))


# Every field that is a plain count, in every message: negative, too big, a bool, no number.
COUNTS = [
    (type(message), name)
    for message in SAMPLES
    for name in message.__struct_fields__
    if type(getattr(message, name)) is int
]


@pytest.mark.parametrize(
    ("kind", "name"), COUNTS, ids=lambda value: getattr(value, "__name__", value)
)
@pytest.mark.parametrize("bad", [-(1 << 70), 1 << 70, True, "1", None])
def test_numbers_out_of_range_raise(kind: type, name: str, bad: Any) -> None:
    if bad is None and kind is m.OperationFailed:
        return  # no source was the cause
    with pytest.raises(ValueError, match=name):
        msgspec.structs.replace(sample(kind), **{name: bad})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (m.ReduceRequested, {"sources": ()}),
        (m.ReduceRequested, {"sources": [ID]}),
        (m.ReduceRequested, {"sources": (b"short",), "num": 1}),
        (m.ReduceRequested, {"sources": ("x" * 16,), "num": 1}),
        (m.ReduceRequested, {"num": 0}),
        (m.ReduceRequested, {"num": 3}),
        (m.ReduceRequested, {"deadline_s": -0.1}),
        (m.ReduceRequested, {"deadline_s": float("nan")}),
        (m.ReduceRequested, {"deadline_s": float("inf")}),
        (m.ReduceRequested, {"reproducible": 1}),
        (m.ReduceRequested, {"results": (b"short",)}),
        (m.ReduceRequested, {"to": (1, 1)}),
        (m.ReduceRequested, {"to": (-1,)}),
        (m.ReduceRequested, {"ready_nbytes": (1, 2)}),
        (m.ReduceRequested, {"ready_layouts": ("text",)}),
        (m.ReduceRequested, {"kind": "broadcast"}),
        (m.ReduceRequested, {"kind": "alltoall", "to": ()}),
        (m.ReduceRequested, {"kind": "gather"}),
        (m.ReduceRequested, {"one_of": ((0, 1),)}),
        (m.ReduceRequested, {"one_of": ((0,),), "num": 1}),
        (m.ReduceRequested, {"one_of": ((0, 1), ())}),
        (m.ReduceRequested, {"one_of": ((0, 1), (1,))}),
        (m.ReduceRequested, {"one_of": ((0,), (2,))}),
        (m.ReduceRequested, {"one_of": ([0], [1])}),
        (m.SourceReady, {"layout": bytes(fields.LAYOUT_BYTES_MAX + 1)}),
        (m.NodeJoined, {"addresses": ("10.0.0.1",)}),
        (m.NodeJoined, {"addresses": ("fe80::1:7001",)}),
        (m.NodeJoined, {"addresses": ("10.0.0.1:70001",)}),
        (m.NodeJoined, {"addresses": ["10.0.0.1:1"]}),
        (m.NodeAdmitted, {"members": ()}),
        (m.NodeAdmitted, {"given": 0}),
        (m.MembersChanged, {"added": (), "removed": ()}),
        (m.LinkMeasured, {"latency_s": -1.0}),
        (m.LinkMeasured, {"bytes_per_s": 0.0}),
        (m.HostMeasured, {"up_bytes_per_s": float("inf")}),
        (m.FetchRequested, {"object": b"short"}),
        (m.FetchRequested, {"holders": (1 << 16,)}),
        (m.Distribute, {"receivers": ()}),
        (m.Distribute, {"receivers": (1, 1)}),
        (m.Distribute, {"receivers": (0, 1)}),
        (m.Distribute, {"rule": "tree:0"}),
        (m.Distribute, {"rule": "tree:x"}),
        (m.Distribute, {"rule": "any"}),
        (m.Distribute, {"rule": "tree:2", "sources": ()}),
        (m.Distribute, {"rule": "parents"}),
        (m.Distribute, {"rule": "parents", "parents": ((0,),)}),
        (m.Distribute, {"parents": ((0, 1),)}),
        (m.FetchRefused, {"error": "value"}),
        (m.ReduceRequested, {"to": (0, 1)}),
        (m.ExecuteReduce, {"destinations": (0, 1)}),
        (m.ExecuteReduce, {"destinations": ()}),
        (m.ExecuteReduce, {"holders": (0,)}),
        (m.ExecuteReduce, {"kind": "gather"}),
        (m.ExecuteReduce, {"kind": "reduce_scatter", "destinations": (1,)}),
        (m.ExecuteReduce, {"shape": "chain"}),
        (m.GroupMembers, {"nodes": (0,)}),
        (m.GroupMembers, {"nodes": (None,) * 64}),
        (m.GroupMembers, {"alive": 2}),
        (m.GroupMembers, {"stripes": ()}),
        (m.ReduceRequested, {"kind": "scatter"}),
        (m.ReduceRequested, {"op": "x" * 257}),
        (m.ReduceRequested, {"ready": (2,)}),
        (m.ReduceRequested, {"ready": (1, 1)}),
        (m.SourceFailed, {"reason": "x" * (fields.TEXT_CHARS_MAX + 1)}),
        (m.SourceFailed, {"reason": "\ud800"}),
        (m.ExecutionFailed, {"error": "unknown"}),
        (m.ExecutionFailed, {"failed_sources": (0, 0)}),
        (m.ExecuteReduce, {"members": (2, 0)}),
        (m.ExecuteReduce, {"members": ()}),
        (m.ExecuteReduce, {"order": (0, 1)}),
        (m.ExecuteReduce, {"order": (0, 0)}),
        (m.ExecuteReduce, {"stripes": ()}),
        (m.ExecuteReduce, {"stripes": (m.Stripe(0, 0, 5),)}),
        (m.ExecuteReduce, {"stripes": WHOLE * 2}),
        (m.ExecuteReduce, {"rule": "perhaps"}),
        (m.Commit, {"contributors": (1, 0)}),
        (m.Commit, {"contributors": ()}),
        (m.OperationFailed, {"error": "unknown"}),
        (m.GroupJoinRequested, {"members_max": 65}),
        (m.GroupJoinRequested, {"name": "x" * 1025}),
        (m.GroupMembers, {"alive": 1, "joining": 1}),
        (m.GroupMembers, {"size": 2}),
        (m.GroupMembers, {"size": 65}),
        (m.GroupMembers, {"formed": 1}),
        (m.GroupJoined, {"rank": 4}),
        (m.GroupRefused, {"error": "reduce"}),
    ],
    ids=str,
)
def test_illegal_fields_raise(kind: type, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        msgspec.structs.replace(sample(kind), **changes)


@pytest.mark.parametrize(
    ("stripes", "why"),
    [
        ((m.Stripe(0, 0, 5), m.Stripe(0, 5, 5), m.Stripe(0, 5, m.SHARES)), "empty"),
        ((m.Stripe(0, 0, 6), m.Stripe(0, 6, 5), m.Stripe(0, 5, m.SHARES)), "empty"),
        ((m.Stripe(0, 0, 5), m.Stripe(0, 6, m.SHARES)), "adjacent"),
        ((m.Stripe(0, 1, m.SHARES),), "adjacent"),
        ((m.Stripe(-1, 0, m.SHARES),), "owners"),
        ((m.Stripe(1 << 64, 0, m.SHARES),), "owners"),
        ((m.Stripe(0, 0, m.SHARES + 1),), "ends"),
        ((m.Stripe(0, 0, m.SHARES - 1),), "cover"),
        ((), "adjacent"),
    ],
)
def test_stripes_not_covering_the_object_raise(stripes: tuple[m.Stripe, ...], why: str) -> None:
    for kind in (m.ExecuteReduce, m.Distribute, m.GroupMembers):
        with pytest.raises(ValueError, match=why):
            msgspec.structs.replace(sample(kind), stripes=stripes)


def test_join_request_with_any_size_and_rank_is_legal() -> None:
    ask = msgspec.structs.replace(sample(m.GroupJoinRequested), size=-1, rank=-3)
    assert (ask.size, ask.rank) == (-1, -3)


def test_shorten_of_any_text_fits() -> None:
    long = "begin" + "x" * fields.TEXT_CHARS_MAX + "end"
    cut = m.SourceFailed(1, 0, m.shorten(long)).reason
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert m.shorten("as it is π") == "as it is π"
    assert m.SourceFailed(1, 0, m.shorten("lone \ud800")).reason == "lone ?"
