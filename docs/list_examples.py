"""A directive of the documentation: the programs of examples/ with their questions and source."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

FOLDER = Path(__file__).resolve().parent.parent / "examples"


class Examples(Directive):
    """`{examples}`: no argument, no content."""

    def run(self) -> list[nodes.Node]:
        """A section for each program."""
        found: list[nodes.Node] = []
        for path in [*sorted(FOLDER.glob("*.py")), *sorted(FOLDER.glob("learning/*.py"))]:
            name = path.relative_to(FOLDER).as_posix()
            text = path.read_text()
            question, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
            name = path.relative_to(FOLDER)
            ids = "-".join(name.with_suffix("").parts).replace("_", "-")
            section = nodes.section(ids=[ids])
            section += nodes.title(text=question)
            section += nodes.paragraph("", "", nodes.literal(text=f"examples/{name}"))
            for part in rest.strip().split("\n\n"):
                section += paragraph(part)
            code = text[text.index('"""', 3) + 3 :].strip() + "\n"
            section += nodes.literal_block(code, code, language="python")
            found.append(section)
        return found


def paragraph(text: str) -> nodes.paragraph:
    """What stands between backticks is a literal: commands keep their quotes and dashes."""
    made = nodes.paragraph()
    for number, part in enumerate(text.replace("``", "`").split("`")):
        made += nodes.literal(text=part) if number % 2 else nodes.Text(part)
    return made


def setup(app: Any) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("examples", Examples)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
