"""What tests open is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Whatever a test puts in is closed behind it."""
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.close()
