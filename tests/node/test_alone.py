"""What the components of a node that is alone are told where others would have been asked, and
whether those of one among others can be asked."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from hoplite_mp._node.runtime.cluster_node import ClusterNode
from hoplite_mp._node.runtime.node_events import ClusterNodeEvents, NodeEvents


def test_checkpoint_counts_immediately_without_other_hosts() -> None:
    """Its checkpoint counts as soon as `done` was called."""
    actor: Any = None
    kept: list[str] = []
    NodeEvents().keep_backup(actor, lambda: kept.append("done"))
    assert kept == ["done"]
    NodeEvents().keep_backup(actor, None)


def test_cluster_node_sets_every_component_of_its_node_events() -> None:
    """An attribute that is set later is forgotten easily."""
    found = {
        one.attr
        for one in ast.walk(ast.parse(inspect.getsource(ClusterNode)))
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
        if isinstance(one.value, ast.Name) and one.value.id == "node_events"
    }
    assert found == ClusterNodeEvents.__annotations__.keys()
