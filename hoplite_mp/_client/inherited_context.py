"""Settings that a program passes to its host's workers, as multiprocessing does to its children.

Why it exists: see `_protocol/inherited_context.py`. multiprocessing is imported only after the
host's processes have been started, so that no program waits for it. If the program has not imported
it before, it has no authkey that anything could depend on yet, and is given the workers' key.
It must never know: how the settings reach the workers.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any

from hoplite_mp._protocol.inherited_context import Birth

__all__ = ["birth_here", "share_authkey"]

AUTHKEY_BYTES = 32


def birth_here() -> Birth:
    """The settings for workers of this program."""
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
    """Gives this process the authkey that its workers have, if multiprocessing was not imported
    before."""
    if "multiprocessing.process" not in sys.modules:
        import multiprocessing.process

        multiprocessing.process.current_process().authkey = birth.authkey
