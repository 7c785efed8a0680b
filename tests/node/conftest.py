"""What several tests of the node's components play on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.node_losses import LossNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network() -> Iterator[LossNetwork]:
    """Four hosts that can die, and their manager. Some files have another one of that name."""
    made = LossNetwork(4)
    yield made
    made.close()
