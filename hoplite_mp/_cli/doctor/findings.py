"""Findings of checks, and their output.

A finding consists of an observation, its level, and advice.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from hoplite_mp._common.locks import DEBUG_VARIABLE
from hoplite_mp._transport.tokens import FILE_VARIABLE, VARIABLE
from hoplite_mp.config import RENAMED, Config
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Check: TypeAlias = Callable[[], Iterable["Finding"]]


__all__ = ["CHECKS", "Finding", "limits", "ok", "problem", "run", "show", "summary", "warning"]


Level = Literal["ok", "warning", "problem"]
LEVEL_CHARS = len("problem")
SUBJECT_CHARS = len("control memory")
OBSERVATION_CHARS_MIN = 30  # minimum width of the observation, even on a narrower terminal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `subject`: one or two words."""

    level: Level
    subject: str
    observation: str
    advice: str = ""


def ok(subject: str, observation: str) -> Finding:
    """The subject has no problem."""
    return Finding("ok", subject, observation)


def warning(subject: str, observation: str, advice: str) -> Finding:
    """The subject works, but is slow or limited."""
    return Finding("warning", subject, observation, advice)


def problem(subject: str, observation: str, advice: str = "") -> Finding:
    """The subject does not work."""
    return Finding("problem", subject, observation, advice)


def run(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yields the findings of the checks, in order. An exception in a check becomes a finding, so
    that the other checks still run."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            observed = f"this check failed: {type(error).__name__}: {error}"
            yield problem(
                name, observed, "the next lines may show the cause; if not, please report it"
            )


def show(finding: Finding, columns: int) -> str:
    """One row of the table: level, subject and observation, with the advice below the
    observation."""
    head = f"{finding.level:{LEVEL_CHARS}}  {finding.subject:{SUBJECT_CHARS}}  "
    width = max(columns - len(head), OBSERVATION_CHARS_MIN)
    lines = [line for text in finding.observation.split("\n") for line in _wrapped(text, width)]
    if finding.advice:
        lines += _wrapped(f"-> {finding.advice}", width, after="   ")
    return head + f"\n{' ' * len(head)}".join(lines)


def _wrapped(text: str, width: int, after: str = "") -> list[str]:
    """The wrapped lines of a text. A text that begins with a space is already aligned, and is not
    wrapped."""
    if text.startswith(" "):
        return [text]
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [""]


def summary(findings: Iterable[Finding]) -> str:
    """The numbers of problems and warnings, for example "1 problem, 2 warnings"."""
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count("problem"), levels.count("warning")
    if not problems and not warnings:
        return "no problems"
    parts = [_counted(problems, "problem") if problems else "no problems"]
    return ", ".join([*parts, *([_counted(warnings, "warning")] if warnings else [])])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


PREFIX = "HOPLITE_MP_"


def limits() -> Config:
    """The limits from the environment or, if they are invalid, the defaults. (`_settings` reports
    invalid limits.)"""
    try:
        return Config.from_environment()
    except ConfigError:
        return Config()


def _settings() -> Iterator[Finding]:
    """Reports the environment variables with this library's prefix, and those among them that are
    invalid or have no effect."""
    fields = {PREFIX + field.name.upper() for field in dataclasses.fields(Config)}
    secret = {VARIABLE}
    known = fields | secret | {FILE_VARIABLE, DEBUG_VARIABLE}
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    renamed = {PREFIX + old.upper(): PREFIX + new.upper() for old, new in RENAMED.items()}
    for name in found:
        if name in renamed:
            yield warning("settings", f"{name} was renamed", f"set {renamed[name]} instead")
        elif name not in known:
            observed = f"{name} is set, but has no effect"
            yield warning("settings", observed, "see the fields of hoplite_mp.Config")
    try:
        Config.from_environment()
    except ConfigError as error:
        yield problem("settings", str(error), "correct the variable, or unset it")
        return
    shown = [f"{name}={os.environ[name]}" for name in found if name in known - secret]
    yield ok("settings", ", ".join(shown) or "no limit is set in the environment")


CHECKS = (_settings,)
