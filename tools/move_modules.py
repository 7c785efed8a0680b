"""Moves modules and packages, and rewrites every reference to them.

    python tools/move_modules.py TABLE

Each line of TABLE is `old new`, both dotted and relative to the package: `node.shell.doors
_node.io.listeners`. A line for a package moves all of its modules that have no line of their own.
`old into new` appends a module to another one, and `old before new` puts it in front of what the
other one defines; the docstring of `old` becomes a comment.
Rewritten are imports (also names of modules that are used as objects), dotted names in strings and
prose, and paths of files in every tracked text file. `ruff check --fix` and `ruff format` put the
imports in order afterwards.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hoplite_mp"
TEXT = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".md", ".toml", ".json", ".txt", ".yaml"}
EXEMPT = ("tools/", "CHANGELOG.md")
# An import inside a string: a program that a test runs, or an example.
IMPORT = re.compile(r"\bfrom hoplite_mp((?:\.\w+)*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)")
DOTTED = re.compile(r"\bhoplite_mp((?:\.[A-Za-z_]\w*)+)")
# A file or a folder, as prose names it: from the repository, the package, or one of its folders.
FILE = re.compile(r"(?<![\w/.-])(hoplite_mp/)?((?:[a-z_]\w*/)*[a-z_]\w*)\.py\b")
FOLDER = re.compile(r"(?<![\w/.-])(hoplite_mp/)?((?:[a-z_]\w*/)+)(?![\w*<{.])")


class Table:
    """Old and new names of modules, without the name of the package."""

    def __init__(self, text: str) -> None:
        self.lines: dict[str, str] = {}
        self.merged: list[tuple[str, str, bool]] = []
        for line in text.splitlines():
            words = line.split("#")[0].split()
            if words:
                self.lines[words[0]] = words[-1]
                if words[1] in {"into", "before"}:
                    self.merged.append((words[0], words[2], words[1] == "before"))
        self.modules = {
            ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(
                ".__init__"
            ): path
            for path in (ROOT / PACKAGE).rglob("*.py")
        }
        self.stems: dict[str, set[str]] = defaultdict(set)  # of the old modules
        for name in self.modules:
            self.stems[name.split(".")[-1]].add(name)

    def new(self, name: str) -> str:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            head = ".".join(parts[:length])
            if head in self.lines:
                return ".".join([self.lines[head], *parts[length:]])
            if head in self.modules and length == len(parts) and head not in self.lines:
                continue
        return name


def imports_rewritten(text: str, table: Table) -> str:
    """The text of a Python file with its import statements rewritten, and the modules' new names
    where the file uses them."""
    tree = ast.parse(text)
    edits: list[tuple[int, int, int, int, str]] = []
    renamed: dict[str, str] = {}
    bound = {
        one.id
        for one in ast.walk(tree)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store | ast.Del)
    } | {one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.split(".")[0] != PACKAGE:
            continue
        base = node.module.removeprefix(PACKAGE).lstrip(".")
        groups: dict[str, list[str]] = defaultdict(list)
        for alias in node.names:
            full = f"{base}.{alias.name}".lstrip(".")
            if full in table.modules:
                parent, _, name = table.new(full).rpartition(".")
            else:
                parent, name = table.new(base) if base else "", alias.name
            kept = alias.asname
            if kept is None and name != alias.name:
                if alias.name in bound:
                    kept = alias.name
                else:
                    renamed[alias.name] = name
            groups[parent].append(f"{name} as {kept}" if kept else name)
        lines = [
            f"from {PACKAGE}{'.' if parent else ''}{parent} import ({', '.join(names)})"
            for parent, names in groups.items()
        ]
        old = ast.get_source_segment(text, node) or ""
        new = ("\n" + " " * node.col_offset).join(lines)
        if len(groups) == 1 and not renamed.keys() & {one.name for one in node.names}:
            (parent,) = groups  # comments and layout stay as they are
            same = [
                one.name if not one.asname else f"{one.name} as {one.asname}" for one in node.names
            ]
            if same == groups[parent]:
                new = old.replace(node.module, f"{PACKAGE}.{parent}".rstrip("."), 1)
        edits.append(
            (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, new)
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in renamed:
            edits.append(
                (
                    node.lineno,
                    node.col_offset,
                    node.lineno,
                    node.col_offset + len(node.id.encode()),
                    renamed[node.id],
                )
            )
    return applied(text, edits)


def applied(text: str, edits: list[tuple[int, int, int, int, str]]) -> str:
    rows = [row.encode() for row in text.splitlines(keepends=True)]
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    data = b"".join(rows)
    for row, column, last_row, last_column, new in sorted(edits, reverse=True):
        begin, end = starts[row - 1] + column, starts[last_row - 1] + last_column
        data = data[:begin] + new.encode() + data[end:]
    return data.decode()


def names_rewritten(text: str, table: Table) -> str:
    """The text with dotted names of modules, and paths of files and folders, rewritten."""

    def dotted(match: re.Match[str]) -> str:
        parts = match[1][1:].split(".")
        for length in range(len(parts), 0, -1):
            head = ".".join(parts[:length])
            if head in table.modules:
                return ".".join([PACKAGE, table.new(head), *parts[length:]])
        return match[0]

    def statement(match: re.Match[str]) -> str:
        base = match[1].lstrip(".")
        found: dict[str, list[str]] = defaultdict(list)
        for one in match[2].split(", "):
            name, _, kept = one.partition(" as ")
            full = f"{base}.{name}".lstrip(".")
            if full in table.modules:
                parent, _, new = table.new(full).rpartition(".")
            else:
                parent, new = (table.new(base) if base else ""), name
            kept = kept or (name if new != name else "")
            found[parent].append(f"{new} as {kept}" if kept else new)
        return "; ".join(
            f"from {PACKAGE}{'.' if parent else ''}{parent} import {', '.join(names)}"
            for parent, names in found.items()
        )

    def path_of(full: str | None, name: str) -> str | None:
        """The new path of a module, as much of it as the old text had."""
        if name in table.modules:
            return table.new(name).replace(".", "/")
        if full or "/" not in name.replace(".", "/"):
            return None
        found = [one for one in table.modules if one.endswith(f".{name}")]
        if len(found) != 1:
            return None
        return "/".join(table.new(found[0]).split(".")[-name.count(".") - 1 :])

    def file(match: re.Match[str]) -> str:
        name = match[2].replace("/", ".")
        if name.endswith(".__init__"):
            new = path_of(match[1], name.removesuffix(".__init__"))
            return match[0] if new is None else f"{match[1] or ''}{new}/__init__.py"
        if "." not in name and not match[1]:
            found = {table.new(one).split(".")[-1] for one in table.stems.get(name, ())}
            return f"{found.pop()}.py" if len(found) == 1 else match[0]
        new = path_of(match[1], name)
        return match[0] if new is None else f"{match[1] or ''}{new}.py"

    def folder(match: re.Match[str]) -> str:
        name = match[2].rstrip("/").replace("/", ".")
        if name not in table.modules or not table.modules[name].name.startswith("__init__"):
            return match[0]
        return f"{match[1] or ''}{table.new(name).replace('.', '/')}/"

    return FOLDER.sub(folder, FILE.sub(file, DOTTED.sub(dotted, IMPORT.sub(statement, text))))


class Parts:
    """The parts of a module: docstring, imports, imports for type checkers, `__all__`, the rest."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.imports: list[str] = []
        self.types: list[str] = []
        self.exports: list[str] = []
        self.body: list[str] = []
        self.docstring = ""
        last = 0
        for node in ast.parse(text).body:
            segment = self.lines[node.lineno - 1 : node.end_lineno]
            gap = self.lines[last : node.lineno - 1]  # comments and decorators above it
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                gap, segment = self.lines[last : first - 1], self.lines[first - 1 : node.end_lineno]
            last = node.end_lineno or 0
            if isinstance(node, ast.Expr) and node.lineno == 1:
                self.docstring = "\n".join(segment)
            elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
                pass
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports += [*(one for one in gap if one.strip()), *segment]
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                inner = self.lines[node.body[0].lineno - 1 : node.body[-1].end_lineno]
                self.types += inner
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.exports = ast.literal_eval(node.value)
            else:
                self.body += [*gap, *segment]

    def text(self) -> str:
        blocks = [self.docstring, "", "from __future__ import annotations", "", *self.imports, ""]
        if self.types:
            blocks += ["if TYPE_CHECKING:", *self.types, ""]
        if self.exports:
            blocks += [f"__all__ = {sorted(set(self.exports))!r}".replace("'", '"'), ""]
        return "\n".join([*blocks, *self.body]) + "\n"


def merge(old: Path, new: Path, name: str, first: bool) -> None:
    """Puts what one module defines into another one: in front, or at the end."""
    source, target = Parts(old.read_text()), Parts(new.read_text())
    target.imports += source.imports
    target.types += source.types
    target.exports += source.exports
    said = source.docstring.strip().strip('"').strip().splitlines()
    note = []
    for paragraph in "\n".join(said).split("\n\n"):
        note += ["#", *(f"# {one}" for one in textwrap.wrap(paragraph, 98))]
    note = note[1:]
    if first:
        target.body = [*note, "", "", *source.body, "", "", *target.body]
    else:
        target.body = [*target.body, "", "", *note, "", "", *source.body]
    text = re.sub(
        rf"^ *from hoplite_mp\.{re.escape(name)} import (\([^)]*\)|.*)\n",
        "",
        target.text(),
        flags=re.MULTILINE,
    )
    new.write_text(text)


def main() -> None:
    table = Table(Path(sys.argv[1]).read_text())
    merged = {old for old, _, _ in table.merged}
    new_names = [table.new(name) for name in table.modules if name not in merged]
    twice = {name for name in new_names if new_names.count(name) > 1}
    assert not twice, f"two modules would have one name: {twice}"

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    for name in git("ls-files").splitlines():
        path = ROOT / name
        if name.startswith(EXEMPT) or path.is_symlink():
            continue
        if path.suffix not in TEXT and path.name not in {
            "Makefile",
            "run",
            ".pre-commit-config.yaml",
        }:
            continue
        before = text = path.read_text()
        if path.suffix in {".py", ".pyi"}:
            text = imports_rewritten(text, table)
        text = names_rewritten(text, table)
        if text != before:
            path.write_text(text)
    for old, new, first in table.merged:
        (target,) = [one for one in table.modules if one not in merged and table.new(one) == new]
        merge(table.modules[old], table.modules[target], new, first)
        git("rm", "-f", str(table.modules[old]))
    for name, path in sorted(table.modules.items()):
        new = table.new(name)
        if new == name or name in merged:
            continue
        to = ROOT / PACKAGE / new.replace(".", "/")
        to = to / "__init__.py" if path.name == "__init__.py" else to.with_suffix(".py")
        to.parent.mkdir(parents=True, exist_ok=True)
        git("mv", str(path), str(to))
    for path in sorted((ROOT / PACKAGE).rglob("*")):
        if path.is_dir() and any(path.glob("*.py")) and not (path / "__init__.py").exists():
            print("needs __init__.py:", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
