"""Several hosts on one machine, for tests and benchmarks; `python -m tests.lan up 4`."""

from tests.lan.emulation import DEVICE, UNLIMITED, Host, Lan, why_not

__all__ = ["DEVICE", "UNLIMITED", "Host", "Lan", "why_not"]
