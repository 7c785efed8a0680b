"""The end of a cell waits for workers' lines, and for no longer than it may."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hoplite_mp.client import printing
from tests.tasks.helpers import PATIENCE_S

if TYPE_CHECKING:
    import pytest


def test_a_cell_ends_although_another_thread_asks_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its question may take long, and the mark's has to wait for it."""
    monkeypatch.setattr(printing, "CELL_WAIT_S", 0.05)
    gate, asked = threading.Event(), threading.Event()

    def ask(number: int) -> None:
        gate.wait(PATIENCE_S)
        asked.set()

    printing.Printer(ask).wait()
    assert not asked.is_set()
    gate.set()
    assert asked.wait(PATIENCE_S)


def test_a_cell_ends_at_once_when_there_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "CELL_WAIT_S", None)  # else for ever

    def ask(number: int) -> None:
        raise OSError("it has ended")

    printing.Printer(ask).wait()
