"""Collectives of one node: what becomes of a run that ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hoplite_mp.node.collectives.operations import Operations


@pytest.mark.parametrize("epoch", [1, 2, None])
def test_a_run_of_an_earlier_plan_is_dropped(epoch: int | None) -> None:
    """The operation was planned again, or dropped, while a thread folded by the earlier plan."""
    operation = SimpleNamespace(epoch=epoch, execution=None, chunked_reduce=None)
    sent: list[Any] = []
    room: Any = SimpleNamespace(
        operations={} if epoch is None else {7: operation},
        client=SimpleNamespace(number=0),
        send=sent.append,
    )
    execution: Any = mock.Mock()
    Operations._ran(room, 7, 1, execution, None)
    assert (operation.execution is execution) == (epoch == 1) == bool(sent)
    assert execution.drop.called == (epoch != 1)
