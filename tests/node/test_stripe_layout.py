"""Which cells of a fold have the same bytes, so that one memory does for both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._node.execution.folding import StripeLayout


@pytest.mark.parametrize("op", ["sum", "max", "mean", "min", "prod"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_sum_is_not_yet_a_mean(op: str, wide: bool) -> None:
    """The quotient is made where a cell becomes final; all else is copied as it is, but into
    another dtype."""
    layout: Any = SimpleNamespace(
        plan=SimpleNamespace(op=op),
        is_final=lambda cell: cell == "result",
        dtype=lambda cell: "<f8" if wide and cell == "result" else "<f4",
    )
    for one in ("part", "result"):
        for other in ("part", "result"):
            same = one == other or (op != "mean" and not wide)
            assert StripeLayout.same_bytes(layout, one, other) is same  # type: ignore[arg-type]
