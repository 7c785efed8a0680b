"""The findings of checks, and their presentation.

Each check reports its observation, whether that is a problem, and what to do about it. The
appearance of findings on a terminal is defined here for all checks.
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
WHAT_CHARS = len("control memory")
WORDS_CHARS_MIN = 30  # even if the terminal is narrower


@dataclass(frozen=True, slots=True)
class Finding:
    """what: the subject, in a word or two; words: the observation; advice: what to do about it."""

    level: Level
    what: str
    words: str
    advice: str = ""


def ok(what: str, words: str) -> Finding:
    """The subject is as it should be."""
    return Finding("ok", what, words)


def warning(what: str, words: str, advice: str) -> Finding:
    """The subject works, but less well than it could, or not for everything."""
    return Finding("warning", what, words, advice)


def problem(what: str, words: str, advice: str = "") -> Finding:
    """The subject does not work."""
    return Finding("problem", what, words, advice)


def run(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yields the findings of the checks, one check after the other. A check that raises becomes a
    finding as well: on a broken host anything may raise, and the other checks still matter."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            seen = f"this check failed: {type(error).__name__}: {error}"
            yield problem(name, seen, "the next lines may say why; if not, please report it")


def show(finding: Finding, columns: int) -> str:
    """One row of the table: the level, the subject, the words, and the advice below them."""
    head = f"{finding.level:{LEVEL_CHARS}}  {finding.what:{WHAT_CHARS}}  "
    width = max(columns - len(head), WORDS_CHARS_MIN)
    lines = [line for text in finding.words.split("\n") for line in _wrapped(text, width)]
    if finding.advice:
        lines += _wrapped(f"-> {finding.advice}", width, after="   ")
    return head + f"\n{' ' * len(head)}".join(lines)


def _wrapped(text: str, width: int, after: str = "") -> list[str]:
    """Lines that fit. A text that begins with a space is already aligned, and is not wrapped."""
    if text.startswith(" "):
        return [text]
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [""]


def summary(findings: Iterable[Finding]) -> str:
    """ "1 problem, 2 warnings"."""
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count("problem"), levels.count("warning")
    if not problems and not warnings:
        return "nothing is wrong"
    told = [_counted(problems, "problem")] if problems else ["no problem"]
    return ", ".join([*told, *([_counted(warnings, "warning")] if warnings else [])])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


PREFIX = "HOPLITE_MP_"


def limits() -> Config:
    """The limits from the environment; the defaults if these cannot be read, which `_settings`
    reports."""
    try:
        return Config.from_environment()
    except ConfigError:
        return Config()


def _settings() -> Iterator[Finding]:
    """The variables that are set, whether they are readable, and those that have no effect although
    their names suggest it."""
    fields = {PREFIX + field.name.upper() for field in dataclasses.fields(Config)}
    secret = {VARIABLE}
    known = fields | secret | {FILE_VARIABLE, DEBUG_VARIABLE}
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    renamed = {PREFIX + old.upper(): PREFIX + new.upper() for old, new in RENAMED.items()}
    for name in found:
        if name in renamed:
            yield warning("settings", f"{name} is an old name", f"set {renamed[name]} instead")
        elif name not in known:
            seen = f"{name} is set, but has no effect"
            yield warning("settings", seen, "see the fields of hoplite_mp.Config")
    try:
        Config.from_environment()
    except ConfigError as error:
        yield problem("settings", str(error), "correct the variable, or unset it")
        return
    shown = [f"{name}={os.environ[name]}" for name in found if name in known - secret]
    yield ok("settings", ", ".join(shown) or "no limit is set in the environment")


CHECKS = (_settings,)
