"""Actors of other hosts, where what is asked for has gone meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hoplite_mp.node.actor_records import Wanted
from hoplite_mp.node.far_actors import FarActors
from hoplite_mp.protocol.actors import BindActor

HOME, NODE = 1001, 1


class Host:
    """What far actors use of their node, which has lost its link to the only other one."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.replies: list[Any] = []
        self.refusals: list[str] = []
        node = SimpleNamespace(
            imports=SimpleNamespace(by_oid={}),
            workers=SimpleNamespace(open_bound=self.open_bound, why_none="no pool is free"),
            client=SimpleNamespace(home=1000),
            reply=lambda slot, reply: self.replies.append(reply),
            actors=SimpleNamespace(of=lambda identity: None, public=lambda oid: b"i" * 16),
        )
        lan = SimpleNamespace(
            peers=SimpleNamespace(send=lambda home, message: False),
            members={NODE: SimpleNamespace(home=HOME)},
            draining=SimpleNamespace(leaving={}),
            delegation=SimpleNamespace(runners={}),
        )
        self.far: Any = FarActors(node, lan)  # type: ignore[arg-type]

    def open_bound(self, owner: int, audience: int) -> int:
        self.opened.append(owner)
        return len(self.opened)

    def granted(self, hold: Any) -> None:
        raise AssertionError("there is no actor")

    def refused(self, why: str, gone: bool) -> None:
        assert gone
        self.refusals.append(why)


def test_an_identity_that_is_gone_takes_no_pool() -> None:
    host = Host()
    host.far.bind(2, 7, BindActor(1 << 40, 3, 0, 0, ()))
    assert "ended" in host.replies[0].error
    assert host.opened == []


def test_a_node_to_which_there_is_no_link_is_gone_at_once() -> None:
    host = Host()
    host.far.begin(host, Wanted(1 << 40, b"", "Counter", "", 0, False, False, 0), NODE)
    assert host.refusals == ["node h1 is gone"]
    assert host.far.asking == {}
