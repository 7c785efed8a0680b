"""What workers have from the program that made their host, as a spawned process has it.

Why it exists: programs read `sys.argv`, pass `multiprocessing.Manager()` proxies, which need the
program's authkey, and look at who their parent is. It travels inside the start message, over a
nameless file; the authkey is a secret, and never goes to other hosts.
It must never know: who applies it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["Birth", "Environment"]

# Changes of the environment of processes of their own (`options(env=)`): name and value, or None
# for a variable that is removed.
Environment: TypeAlias = tuple[tuple[str, str | None], ...]


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """`start_method`: of multiprocessing, if the program has set one; else ""."""

    pid: int
    authkey: bytes
    argv: list[bytes]
    faulthandler: bool
    start_method: str
