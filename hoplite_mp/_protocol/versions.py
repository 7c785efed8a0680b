"""The software versions at both ends of a connection, and whether they can work together.

Functions travel as byte code and arrays as pickles. Between different minor versions that may fail
late, or give wrong results without an error. So the handshake fails instead, with a table.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import TYPE_CHECKING

from hoplite_mp._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["compare_versions", "software_versions"]

# What must match besides Python and this library: arrays are pickled by numpy, code by cloudpickle.
PACKAGES = ("cloudpickle", "numpy")
ABSENT = "-"

_MAJOR_MINOR = re.compile(r"(\d+)\.(\d+)")


def software_versions() -> dict[str, str]:
    """The versions of this process's software, by name, for the other side to compare.

    They are read from imported modules, and for other modules from the installation, so that none
    of them is imported.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3])), "hoplite_mp": __version__}
    for name in PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        found[name] = version if isinstance(version, str) else _installed(name)
    return found | {"byte order": sys.byteorder}


def compare_versions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """None if the two can work together; otherwise a table of the differences, for a message.

    Major and minor version must match; a value that is no version number must be the same; a name
    that one side lacks is a difference.
    """
    names = [*mine, *(name for name in theirs if name not in mine)]
    rows = [
        (name, mine.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in names
        if _essence(mine.get(name)) != _essence(theirs.get(name))
    ]
    if not rows:
        return None
    table = [("", "here", "there"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in table]
    return "\n".join(lines)


def _essence(version: str | None) -> object:
    """The part of a version that must match."""
    match = _MAJOR_MINOR.match(version or "")
    return version if match is None else (int(match[1]), int(match[2]))


@functools.cache
def _installed(name: str) -> str:
    # Imported only here, because it takes some ms, and numpy and cloudpickle are nearly always
    # loaded already.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT
