"""What workers take over from the program that started their host, as a spawned process does.

Functions read `sys.argv`, use `multiprocessing.Manager()` proxies, which need the program's
authkey, and ask for their parent process. An InheritedContext travels inside the start message,
over a nameless file; the authkey is a secret, and is never sent to other hosts.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["Environment", "InheritedContext"]

# Changes of the environment of an actor's or a pool's processes (`options(env=)`): name and value,
# or None for a variable that is removed.
Environment: TypeAlias = tuple[tuple[str, str | None], ...]


class InheritedContext(msgspec.Struct, frozen=True, kw_only=True):
    """`start_method`: that of multiprocessing, if the program has set one; otherwise ""."""

    pid: int
    authkey: bytes
    argv: list[bytes]
    faulthandler: bool
    start_method: str
