"""A directive of the documentation: what `--help` prints, for each command of `hoplite-mp`."""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive

from hoplite_mp._cli.main import parser


class CommandLine(Directive):
    """`{command-line}`: no argument, no content."""

    def run(self) -> list[nodes.Node]:
        """A literal block for each command, in the order of `hoplite-mp --help`."""
        found: list[nodes.Node] = []
        with mock.patch.dict("os.environ", COLUMNS="96", NO_COLOR="1"):
            top = parser()
            (commands,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
            for name, command in commands.choices.items():
                found.append(nodes.rubric(text=f"hoplite-mp {name}"))
                text = command.format_help()
                found.append(nodes.literal_block(text, text, language="text"))
        return found


def setup(app: Any) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
