"""The programs of docs/joblib.md run, and what it compares gives the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lan import forked

PAGE = Path(__file__).resolve().parents[2] / "docs" / "joblib.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SHOWN = {
    1: "print(len(norms), norms == [norm(data, i) for i in range(len(data))])",
    2: "print(len(search.cv_results_['mean_test_score']))",
    3: "print(squares == [i * i for i in range(100)])",
}
EXPECTED = {1: "2000 True", 2: "3", 3: "True"}


def test_the_page_has_these_programs() -> None:
    assert len(BLOCKS) == 4
    ours, theirs = (block.replace("hoplite_mp", "loky") for block in BLOCKS[1::-1])
    changed = {line for line in ours.split("\n") if line not in theirs.split("\n")}
    assert changed == {"import loky.integrations.joblib", *[x for x in changed if "data =" in x]}


@pytest.mark.soak  # tests/docs runs the page, too
@pytest.mark.parametrize("number", SHOWN)
def test_a_program_of_the_page(number: int, tmp_path: Path) -> None:
    """As a script, so that its functions are those of the main module."""
    script = tmp_path / "program.py"
    script.write_text(BLOCKS[number] + "\n" + SHOWN[number] + "\n")
    done = forked.run([sys.executable, str(script)], timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXPECTED[number]
