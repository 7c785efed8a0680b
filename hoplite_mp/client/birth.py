"""What the program that makes a host hands to its workers, as to spawned processes.

Why it exists: see `protocol/birth.py`. multiprocessing is imported only after the host's processes
have been started, so that no program waits for it: until then it has no authkey that anybody could
know, and gets the one that the workers have.
It must never know: how it gets there.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any

from hoplite_mp.protocol.birth import Birth

__all__ = ["birth_here", "share_authkey"]

AUTHKEY_BYTES = 32


def birth_here() -> Birth:
    """Of workers of this program."""
    process: Any = sys.modules.get("multiprocessing.process")
    context: Any = sys.modules.get("multiprocessing.context")
    key = os.urandom(AUTHKEY_BYTES) if process is None else process.current_process().authkey
    method = None
    if context is not None:
        method = context._default_context.get_start_method(allow_none=True)
    argv = [os.fsencode(word) for word in getattr(sys, "argv", ()) if isinstance(word, str)]
    return Birth(
        pid=os.getpid(),
        authkey=bytes(key),
        argv=argv,
        faulthandler=faulthandler.is_enabled(),
        start_method=method or "",
    )


def share_authkey(birth: Birth) -> None:
    """This process has the key that its workers were given, also when multiprocessing comes
    later."""
    if "multiprocessing.process" not in sys.modules:
        import multiprocessing.process

        multiprocessing.process.current_process().authkey = birth.authkey
