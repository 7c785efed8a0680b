"""What docs/engines.md says of an engine, and hosts with the addresses that stand there.

Commands and programs of the page are run as they are, letter by letter.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.engines.programs import ROOT
from tests.lan import Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["blocks", "environment", "page_lan"]

FIRST = 10  # the last number of the first host's address there


def blocks(engine: str) -> tuple[list[str], list[str]]:
    """The commands and the programs of that section."""
    page = (ROOT / "docs" / "engines.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    (text,) = [one for one in sections if one.startswith(f"{engine}\n")]
    shell = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return shell, re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@contextlib.contextmanager
def page_lan(size: int) -> Iterator[Lan]:
    """Hosts at 192.168.1.10 and the next ones; each has a default route there, as hosts have."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no emulated hosts: {reason}")
    with Lan(size) as made:
        for number, host in enumerate(made, FIRST):
            address = f"192.168.1.{number}"
            for words in (
                ("address", "add", f"{address}/24", "dev", "eth0"),
                ("route", "add", "default", "dev", "eth0", "src", address),
            ):
                subprocess.run(host.enter("ip", *words), check=True)
        yield made


def environment() -> dict[str, str]:
    """Where the engine's command is, and this package."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
