"""Renames classes, functions and constants of modules, and every reference to them.

    python tools/rename_classes.py TABLE

Each line of TABLE is `module.Old New`, with the module relative to the package. References are
found by what a file imports, so two modules may rename the same old name differently: names in code
are rewritten by the syntax tree, comments and docstrings of the same file by the word. A name that
no other module defines, and that has a capital and a small letter inside, is also rewritten in all
pages.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hoplite_mp"
FOLDERS = ("hoplite_mp", "tests", "docs", "benchmarks", "examples")


def module_of(path: Path) -> str:
    if not path.is_relative_to(ROOT / PACKAGE):
        return ""
    return ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Module -> old name -> new name."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words:
            module, _, old = words[0].rpartition(".")
            found[module][old] = words[1]
    return found


def renames_of(
    tree: ast.Module, module: str, table: dict[str, dict[str, str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """What a file calls by an old name: (names, modules by the name they are bound to)."""
    names = dict(table.get(module, {}))
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            for alias in node.names:
                if alias.name in table.get(base, {}) and alias.asname is None:
                    names[alias.name] = table[base][alias.name]
                full = f"{base}.{alias.name}".lstrip(".")
                if full in table:
                    modules[alias.asname or alias.name] = full
    return names, modules


def rewritten(text: str, module: str, table: dict[str, dict[str, str]]) -> str:
    tree = ast.parse(text)
    names, modules = renames_of(tree, module, table)
    rows = text.splitlines(keepends=True)
    edits: dict[tuple[int, int], tuple[str, str]] = {}
    aliases: dict[tuple[int, int], tuple[str, str]] = {}

    def column(row: int, offset: int) -> int:
        return len(rows[row - 1].encode()[:offset].decode())

    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            edits[node.lineno, column(node.lineno, node.col_offset)] = node.id, names[node.id]
        elif isinstance(node, ast.ClassDef) and node.col_offset == 0 and node.name in names:
            edits[node.lineno, len("class ")] = node.name, names[node.name]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.col_offset == 0:
            if node.name in names:
                edits[node.lineno, rows[node.lineno - 1].index(node.name)] = (
                    node.name,
                    names[node.name],
                )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of = table.get(modules.get(node.value.id, ""), {})
            if node.attr in of:
                end = column(node.end_lineno or 0, node.end_col_offset or 0)
                edits[node.end_lineno or 0, end - len(node.attr)] = node.attr, of[node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            for alias in node.names:
                if alias.name in table.get(base, {}):
                    aliases[alias.lineno, column(alias.lineno, alias.col_offset)] = (
                        alias.name,
                        table[base][alias.name],
                    )
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and module:
            for item in ast.walk(node.value):
                if isinstance(item, ast.Constant) and item.value in names:
                    at = column(item.lineno, item.col_offset) + 1
                    edits[item.lineno, at] = item.value, names[item.value]
    edits |= aliases
    # A word that is also plain English counts only in backticks.
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b") if names else None

    def is_name(row: str, match: re.Match[str]) -> bool:
        return bool(re.search(r"[a-z][A-Z]", match[1])) or row[: match.start()].count("`") % 2 == 1

    out: list[str] = []
    # Positions of comments and of strings that are statements (docstrings), rewritten by the word.
    prose: list[tuple[int, int, int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose.append((*token.start, *token.end))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            last = node.end_lineno or 0
            begin = column(node.lineno, node.col_offset)
            prose.append((node.lineno, begin, last, column(last, node.end_col_offset or 0)))

    def in_prose(row: int, at: int) -> bool:
        return any((a, b) <= (row, at) < (c, d) for a, b, c, d in prose)

    touched = {row for a, _, c, _ in prose for row in range(a, c + 1)}
    for number, row in enumerate(rows, 1):
        here = {at: pair for (line, at), pair in edits.items() if line == number}
        if pattern is not None and number in touched:
            for match in pattern.finditer(row):
                if in_prose(number, match.start()) and is_name(row, match):
                    here.setdefault(match.start(), (match[1], names[match[1]]))
        for at, (old, new) in sorted(here.items(), reverse=True):
            assert row[at : at + len(old)] == old, (module, number, row, old)
            row = row[:at] + new + row[at + len(old) :]
        out.append(row)
    return "".join(out)


def with_reexports(table: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The table with the names that modules pass on from the modules that define them."""
    found = {module: dict(names) for module, names in table.items()}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
                for alias in node.names:
                    if alias.name in table.get(base, {}) and alias.asname in (None, alias.name):
                        found.setdefault(module_of(path), {})[alias.name] = table[base][alias.name]
    return found


def defined_twice() -> set[str]:
    seen: dict[str, int] = defaultdict(int)
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                seen[node.name] += 1
    return {name for name, count in seen.items() if count > 1}


def main() -> None:
    table = read_table(Path(sys.argv[1]).read_text())
    twice = defined_twice()
    everywhere = {
        old: new
        for names in table.values()
        for old, new in names.items()
        if old not in twice and re.search(r"[a-z][A-Z]", old)
    }
    dotted = {
        f"{PACKAGE}.{module}.{old}": f"{PACKAGE}.{module}.{new}"
        for module, names in table.items()
        for old, new in names.items()
    }
    for module, names in table.items():
        path = ROOT / PACKAGE / f"{module.replace('.', '/')}.py"
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        there = path.read_text()
        for old in names:
            assert re.search(rf"^(class |def |async def |){old}\b", there, re.M), f"{module}.{old}"
    wide = with_reexports(table)
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    for path in [*paths, ROOT / "README.md"]:
        if path.suffix not in {".py", ".md", ".pyi"} or "_build" in path.parts:
            continue
        before = text = path.read_text()
        if path.suffix == ".py":
            text = rewritten(text, module_of(path), wide)
        for old, new in dotted.items():
            text = re.sub(rf"\b{re.escape(old)}\b", new, text)
        for old, new in everywhere.items():
            text = re.sub(rf"\b{old}\b", new, text)
        if text != before:
            path.write_text(text)


if __name__ == "__main__":
    main()
