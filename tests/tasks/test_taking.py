"""Objects that the node gives are held before any other thread can acknowledge its reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._client.channel import take_over, take_over_all
from hoplite_mp._protocol.local import Import, Imported

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = 3


class Line:
    """A process's line to its node, and its client; what happens is written down."""

    def __init__(self, given: list[int], gone: int = 0) -> None:
        self.client = self.channel = self
        self.given, self.gone = given, gone
        self.seen = [0]
        self.happened: list[Any] = []

    def hold(self, oid: int) -> str | None:
        self.happened.append(oid)
        return None if oid == self.gone else f"hold on {oid}"

    def call(self, ask: Any, take: Callable[..., Any]) -> Any:
        taken = take(self.given, NUMBER, self.seen)
        assert self.seen == [NUMBER]
        self.happened.append("the lock is free")
        return taken

    def tell(self, message: Imported) -> None:
        self.happened.append(message.number)


@pytest.mark.parametrize("gone", [0, 7])
def test_all_are_held_while_the_lock_is_held(gone: int) -> None:
    line = Line([5, 0, 7], gone)
    holds = take_over_all(line, Import([b"a", b"b", b"c"]), list)  # type: ignore[arg-type]
    assert holds == ["hold on 5", None, None if gone else "hold on 7"]
    assert line.happened == [5, 7, "the lock is free", NUMBER]


def test_one() -> None:
    line = Line([5])
    assert take_over(line, Import([b"a"]), lambda oids: oids[0]) == "hold on 5"  # type: ignore[arg-type]
    assert line.happened == [5, "the lock is free", NUMBER]
