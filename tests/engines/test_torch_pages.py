"""The page about torch and the example, run as they stand: `make test` cannot, it has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.documents import PROGRAMS, ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = {name: text for name, (page, text) in PROGRAMS.items() if page.stem == "torch"}
EXAMPLE = ROOT / "examples" / "training_with_torch.py"


def run(path: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", PAGE)
def test_the_page(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PAGE[name])
    said = run(program, tmp_path).splitlines()
    comments = [line.partition("print(")[2] for line in PAGE[name].splitlines() if "print(" in line]
    for line, comment in zip(said, comments, strict=True):
        shown = comment.partition("# ")[2].removeprefix("three times ")
        assert shown in line


def test_the_page_has_its_programs() -> None:
    assert len(PAGE) == 3


def test_the_example(tmp_path: Path) -> None:
    said = run(EXAMPLE, tmp_path).splitlines()
    assert len(said) == 3
    assert "(0, 2)" in said[0]
    assert "from step 0," not in said[1]
