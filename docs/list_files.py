"""A table of all files of the library, each with the sentence with which it opens.

Whoever wants to change something has to find the one file that it belongs into, and every file says
in its first sentences what it is for. This is a directive of the documentation, and a command that
searches: `python docs/list_files.py [WORD ...]` (`make files`) prints those files whose opening has
all of these words.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("hoplite_mp", "cext")
C = re.compile(r"\A/\*(.*?)\*/", re.DOTALL)
HASHES = re.compile(r"\A((?:#.*\n)+)")
DOCSTRING = re.compile(r'\A"""(.*?)"""', re.DOTALL)


def opening(path: Path) -> str:
    """With what a file opens: its docstring, or its first comment."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    found = next((one for one in (C, HASHES, DOCSTRING) if one.match(text)), None)
    said = "" if found is None else found.match(text)[1]  # type: ignore[index]
    return "\n".join(line.lstrip(" *#").rstrip() for line in said.splitlines()).strip()


def sentence(said: str) -> str:
    """The first paragraph of an opening, in one line."""
    return " ".join(said.partition("\n\n")[0].split())


def files() -> Iterator[tuple[str, str]]:
    """Path and opening of each file that has one, from the root of the repository."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*"), key=lambda one: (one.parent, one.name)):
            if path.suffix in {".py", ".pyx", ".pxi", ".c", ".h"} and (said := opening(path)):
                yield str(path.relative_to(ROOT)), said


def setup(app: Any) -> dict[str, Any]:
    """For Sphinx."""
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from list_examples import paragraph

    class Files(Directive):
        """`{files}`: no argument, no content."""

        def run(self) -> list[Any]:
            """A section for each folder."""
            found = []
            for folder, inside in groupby(files(), lambda one: one[0].rpartition("/")[0]):
                section = nodes.section(ids=["in-" + folder.replace("/", "-")])
                section += nodes.title(text=folder)
                listed = nodes.bullet_list()
                for path, said in inside:
                    entry = paragraph(f"`{path.rpartition('/')[2]}`: {sentence(said)}")
                    listed += nodes.list_item("", entry)
                section += listed
                found.append(section)
            return found

    app.add_directive("files", Files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    words = [word.lower() for word in sys.argv[1:]]
    for place, opens in files():
        if all(word in f"{place}\n{opens}".lower() for word in words):
            print(f"{place}: {sentence(opens)}")
