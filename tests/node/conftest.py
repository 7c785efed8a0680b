"""What several tests of the node's components play on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.node_harness import NodeHarness
from tests.support.node_hosts import Network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def network() -> Iterator[Network]:
    """Four hosts that can die, and their manager. Some files have another one of that name."""
    made = Network(4)
    yield made
    made.close()


@pytest.fixture
def make_node() -> Iterator[Callable[..., NodeHarness]]:
    """Makes nodes as `NodeHarness` does; they are closed after the test."""
    made: list[NodeHarness] = []

    def make(*about: Any, **options: Any) -> NodeHarness:
        made.append(NodeHarness(*about, **options))
        return made[-1]

    yield make
    for node in made:
        node.close()
