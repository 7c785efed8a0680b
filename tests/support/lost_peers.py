"""Members that are lost, as components of a node hear of them."""

from __future__ import annotations

from hoplite_mp._protocol.messages import Member


def gone(host_id: int = 0, node: int = 0) -> Member:
    """A member of which a component needs only these numbers."""
    return Member(node, 1, host_id, 0)
