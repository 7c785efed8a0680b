"""A directive of the documentation: every field of `Config` as a table, read from its source.

The words about a limit stand below its field and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any, TypeGuard

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from hoplite_mp import config


def is_config(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    """Whether this is the class itself."""
    return isinstance(node, ast.ClassDef) and node.name == "Config"


def explained() -> list[tuple[str, str, str]]:
    """For each field: name, default as it is written, what stands below it."""
    source = ast.parse(Path(config.__file__).read_text())
    (body,) = (cls.body for cls in source.body if is_config(cls))
    found = []
    for field, words in itertools.pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr)):
            continue
        default = ast.unparse(field.value) if field.value is not None else ""
        text = inspect.cleandoc(words.value.value)  # type: ignore[attr-defined]
        found.append((field.target.id, default, text))  # type: ignore[union-attr]
    return found


class ConfigTable(Directive):
    """`{config-table}`: no argument, no content."""

    def run(self) -> list[nodes.Node]:
        """A table of three columns."""
        table = nodes.table(classes=["config"])
        group = nodes.tgroup(cols=3)
        group += [nodes.colspec(colwidth=width) for width in (25, 12, 63)]
        table += group
        group += nodes.thead("", self.row("field", "default", "what it limits, and what it costs"))
        body = nodes.tbody()
        group += body
        for name, default, words in explained():
            row = self.row(name, default, words, literal=2)
            row["ids"].append(f"config-{name.replace('_', '-')}")
            body += row
        return [table]

    def row(self, *cells: str, literal: int = 0) -> nodes.row:
        """The first cells as code, the rest as text."""
        row = nodes.row()
        for place, cell in enumerate(cells):
            entry = nodes.entry()
            if place < literal:
                entry += nodes.paragraph("", "", nodes.literal("", cell))
            else:
                self.state.nested_parse(StringList(cell.splitlines(), "config.py"), 0, entry)
            row += entry
        return row


def setup(app: Any) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("config-table", ConfigTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
