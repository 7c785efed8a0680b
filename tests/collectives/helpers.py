"""What the tests of collectives share: gates that tasks wait at, polling with an end, bits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 20.0


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Polls until the condition holds; fails the test when it does not in time."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {PATIENCE_S} s"
        time.sleep(0.001)
    return found


class Gate:
    """A file that tasks wait for, and files by which they say that they are there."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.path = Path(folder) / name

    def open(self) -> None:
        self.path.touch()

    def wait(self) -> None:
        eventually(self.path.exists, f"gate {self.path.name}")


def after(gate: Gate, value: Any) -> Any:
    """A task's body: the value, once the gate is open."""
    gate.wait()
    return value


def failing_after(gate: Gate, text: str) -> Any:
    gate.wait()
    raise KeyError(text)


def fail(text: str) -> Any:
    raise KeyError(text)


def bits(array: Any) -> tuple[Any, ...]:
    """Equal exactly when shape, dtype and every bit are."""
    array = np.asarray(array)
    return array.shape, array.dtype.str, array.dtype.name, np.ascontiguousarray(array).tobytes()


def same(a: Any, b: Any) -> bool:
    """Bit for bit, but any NaN is a NaN and its sign is nobody's promise."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind not in "fcV":
        return bits(a) == bits(b)
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all()) and bits(a[~nan]) == bits(b[~nan])
