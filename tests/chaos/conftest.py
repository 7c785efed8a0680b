"""Emulated hosts for chaos: the same as those of tests/lan."""

from tests.support.clusters import lan_permitted

__all__ = ["lan_permitted"]
