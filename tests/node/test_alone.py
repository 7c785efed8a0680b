"""What the rooms of a node that is alone are told where others would have been asked."""

from __future__ import annotations

from typing import Any

from hoplite_mp.node.core.wiring import Upward


def test_an_actor_goes_on_at_once_where_nobody_can_keep_a_spare_of_it() -> None:
    """Its checkpoint counts as soon as `done` was called."""
    actor: Any = None
    kept: list[str] = []
    Upward().keep_spare(actor, lambda: kept.append("done"))
    assert kept == ["done"]
    Upward().keep_spare(actor, None)
