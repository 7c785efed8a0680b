"""Emulated hosts for campaigns: the same as those of tests/lan."""

from tests.lan.conftest import lan_permitted

__all__ = ["lan_permitted"]
