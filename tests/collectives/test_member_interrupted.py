"""What a member gives to its node is held until the commit, wherever a signal handler raises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hoplite_mp.member import HostsMember

REF: Any = object()
AFTER = "_next_block", "_keep_own"  # what runs after the message to the node


class Member(HostsMember):
    """One that gives an object of the store; its node hears what it sends."""

    def __init__(self, at: str) -> None:
        self.sent: list[Any] = []
        self.small: Any = SimpleNamespace(give=lambda *about: False)
        self._in_place: Any = SimpleNamespace(ref=lambda array, lends: REF)
        self._channel: Any = SimpleNamespace(tell=self.sent.append)
        self._memory: Any = SimpleNamespace(local_id=lambda ref: 8)
        self._generation = self.rank = 0
        self._large_roots = set()
        self._spare, self._given = (0, None), 0
        setattr(self, at, self.interrupt)

    def interrupt(self, *_: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", AFTER)
def test_it_is_held_once_it_was_sent(at: str) -> None:
    member, held = Member(at), [object()]  # an earlier try was interrupted, too
    before = list(held)
    with pytest.raises(KeyboardInterrupt):
        member.give(3, ("allreduce", "sum", 0, [np.ones(9)]), False, True, held)
    (ask,) = member.sent
    assert ask.parts == [8]
    assert held == [*before, REF]
