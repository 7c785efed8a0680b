"""Source text of functions by value, for tracebacks in other processes.

A reader may not have the file of a function: a notebook's cell has no file, and a script may be on
another host. Therefore a function by value contains the text of the top-level statement in which
it is defined. The reader passes the text to `linecache`, which tracebacks, warnings and `inspect`
use.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types

# If the statement is longer than this, only the function's own lines are sent, cut at this length.
# Higher: longer streams.
BLOCK_CHARS_MAX = 64 << 10
FILES_MAX = 1024  # maximum number of files whose text is kept; the oldest is dropped

Source = tuple[str, int, str]  # file name, number of the first line, text


class _Lines(list[str]):
    """The lines of a file. Lines that were not received with any function are empty."""


_files: dict[str, _Lines] = {}
# Code -> the lines of its file, and the result of `source_of` for these lines.
_known: weakref.WeakKeyDictionary[types.CodeType, tuple[list[str], Source | None]] = (
    weakref.WeakKeyDictionary()
)


def source_of(code: types.CodeType) -> Source | None:
    """The text of the top-level statement around a function's code; None if this process does not
    have the text."""
    name = code.co_filename
    linecache.checkcache(name)
    lines = linecache.getlines(name)
    known = _known.get(code)
    if known is None or known[0] is not lines or (known[1] and known[1][0] != name):
        known = _known[code] = lines, _source(code, lines)
    return known[1]


def _source(code: types.CodeType, lines: list[str]) -> Source | None:
    first, last = _own_lines(code)
    if not 0 < first <= last <= len(lines):
        return None
    start, end = _statement(lines, first, last)
    text = "".join(lines[start - 1 : end])
    if len(text) > BLOCK_CHARS_MAX:
        start, text = first, "".join(lines[first - 1 : last])[:BLOCK_CHARS_MAX]
    return sys.intern(code.co_filename), start, text


def _own_lines(code: types.CodeType) -> tuple[int, int]:
    """The numbers of the first and the last line of the code, excluding the lines of inner
    functions."""
    numbers = [line for _, _, line in code.co_lines() if line]
    return code.co_firstlineno, max(numbers, default=code.co_firstlineno)


def _statement(lines: list[str], first: int, last: int) -> tuple[int, int]:
    """The numbers of the first and the last line of the top-level statement around these lines."""
    start, end = first, last
    while start > 1 and not _begins(lines[start - 1]):
        start -= 1
    while start > 1 and lines[start - 2].startswith("@"):
        start -= 1
    while end < len(lines) and not _begins(lines[end]):
        end += 1
    while end > last and not lines[end - 1].strip():
        end -= 1
    return start, end


def _begins(line: str) -> bool:
    """Whether a top-level statement may begin with this line."""
    return bool(line.strip()) and line[0] not in " \t#)]}"


def keep_source(source: Source) -> None:
    """Adds the text to `linecache`, unless this process has read the file itself."""
    name, first, text = source
    entry = linecache.cache.get(name)
    lines = _files.get(name)
    if entry is not None and (lines is None or entry[2:3] != (lines,)):
        return
    new = text.splitlines(keepends=True)
    span = slice(first - 1, first - 1 + len(new))
    if entry is not None and lines is not None and lines[span] == new:
        return
    found = _Lines(lines or ())
    found.extend(["\n"] * (span.stop - len(found)))
    found[span] = new
    _files[name] = found
    # The entry has no modification time, so `linecache` never compares it with a file of that name.
    linecache.cache[name] = sum(map(len, found)), None, found, name
    if len(_files) > FILES_MAX:
        oldest = next(iter(_files))
        del _files[oldest]
        linecache.cache.pop(oldest, None)
