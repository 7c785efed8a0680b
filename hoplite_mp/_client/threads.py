"""Threads of this library in the user's processes, and the error if one cannot be started."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["starting_thread"]

NONE_LEFT = "can't start new thread"  # what CPython says when the system refuses


@contextlib.contextmanager
def starting_thread(purpose: str) -> Iterator[None]:
    """Surrounds the start of a thread. ConfigError if the system refuses it."""
    try:
        yield
    except RuntimeError as error:
        if NONE_LEFT not in str(error):
            raise
        raise ConfigError(
            f"no thread can be started that {purpose}: every process and thread that this user may "
            "have is in use, or memory is short; raise the limit (ulimit -u, or the control "
            "group), or start fewer workers"
        ) from error
