"""The limits that the environment sets: checked once, then used by the other checks.

Why it exists: one wrong variable must be one problem, not a problem in every check that needs a
limit.
It must never know: what the limits are for.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from hoplite_mp._cli.doctor.findings import ok, problem, warning
from hoplite_mp._common.locks import DEBUG_VARIABLE
from hoplite_mp._transport.tokens import FILE_VARIABLE, VARIABLE
from hoplite_mp.config import Config
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._cli.doctor.findings import Finding

__all__ = ["CHECKS", "limits"]

PREFIX = "HOPLITE_MP_"


def limits() -> Config:
    """The limits as the environment sets them; the defaults if they cannot be read, which
    `_settings` reports."""
    try:
        return Config.from_environment()
    except ConfigError:
        return Config()


def _settings() -> Iterator[Finding]:
    """The variables that are set, whether they can be read, and those that have no effect although
    their names look like it."""
    fields = {PREFIX + field.name.upper() for field in dataclasses.fields(Config)}
    secret = {VARIABLE}
    known = fields | secret | {FILE_VARIABLE, DEBUG_VARIABLE}
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    for name in found:
        if name not in known:
            seen = f"{name} is set, and nobody reads it"
            yield warning("settings", seen, "the fields of hoplite_mp.Config are what can be set")
    try:
        Config.from_environment()
    except ConfigError as error:
        yield problem("settings", str(error), "correct the variable, or unset it")
        return
    shown = [f"{name}={os.environ[name]}" for name in found if name in known - secret]
    yield ok("settings", ", ".join(shown) or "no limit is set in the environment")


CHECKS = (_settings,)
