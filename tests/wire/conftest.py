"""The emulated hosts are those of tests/lan."""

from tests.support.clusters import lan_permitted

__all__ = ["lan_permitted"]
