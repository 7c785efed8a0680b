"""Renames identifiers: attributes, variables, parameters, constants.

    python3.12 tools/rename_identifiers.py TABLE      (or newer: names inside f-strings are tokens)

Each line of TABLE is `old new folder...`: every name `old` in the code of these folders becomes
`new`, and so does the word in backticks in comments and docstrings, and in `__all__`. A file that
has both names already is reported and left alone, because two things would become one; `+` before
the new name renames there, too.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUOTED = re.compile(r"`([^`\n]+)`")


def paths_in(text: str) -> set[tuple[int, int]]:
    """Where the names of packages and modules stand behind `from`."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    found: set[tuple[int, int]] = set()
    inside = False
    for before, one in zip([None, *tokens], tokens, strict=False):
        if one.string == "from" and (before is None or not before.string.strip()):
            inside = True
        elif one.string == "import":
            inside = False
        if inside:
            found.add(one.start)
    return found


def names_of(text: str) -> set[str]:
    paths = paths_in(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {one.string for one in tokens if one.type == tokenize.NAME and one.start not in paths}


def renamed(text: str, names: dict[str, str]) -> str:
    word = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")

    def in_backticks(found: re.Match[str]) -> str:
        return f"`{word.sub(lambda one: names[one[1]], found[1])}`"

    rows = text.splitlines(keepends=True)
    paths = paths_in(text)
    edits: list[tuple[int, int, int, str]] = []
    exports = False
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        if one.type == tokenize.NAME and one.string in names and one.start not in paths:
            edits.append((*one.start, one.end[1], names[one.string]))
        elif one.type == tokenize.NAME and one.string == "__all__":
            exports = True
        elif one.type == tokenize.NEWLINE:
            exports = False
        elif exports and one.type == tokenize.STRING and one.string.strip("\"'") in names:
            edits.append((*one.start, one.end[1], f'"{names[one.string[1:-1]]}"'))
        elif one.type == tokenize.COMMENT:
            edits.append((*one.start, one.end[1], QUOTED.sub(in_backticks, one.string)))
    for row, begin, end, new in sorted(edits, reverse=True):
        rows[row - 1] = rows[row - 1][:begin] + new + rows[row - 1][end:]
    text = "".join(rows)
    # Docstrings: a string that is a statement of its own.
    return re.sub(
        r'^( *)"""(.*?)"""',
        lambda found: found[0] if not found[2] else QUOTED.sub(in_backticks, found[0]),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def main() -> None:
    table = [line.split("#")[0].split() for line in Path(sys.argv[1]).read_text().splitlines()]
    for path in sorted(path for path in ROOT.rglob("*.py") if "/." not in str(path)):
        inside = str(path.relative_to(ROOT))
        names = {
            words[0]: words[1]
            for words in table
            if words and any(inside.startswith(folder) for folder in words[2:])
        }
        if not names:
            continue
        text = path.read_text()
        there = names_of(text)
        for old, new in list(names.items()):
            names[old] = new.removeprefix("+")
            if old not in there:
                del names[old]
            elif new in there:
                print(f"{inside}: has {old} and {new}")
                del names[old]
        if names:
            path.write_text(renamed(text, names))


if __name__ == "__main__":
    main()
