"""Every example runs, is short, and answers a question."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.documents import run_file

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ROOT / "examples", ROOT / "examples" / "learning"
EXAMPLES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))
LINES_MAX = 80
# Of a long example: what is less in the test.
LESS = {"robust": ("= 8, 200, 32,", "= 8, 40, 32,")}  # steps of training


def missing(example: Path) -> list[str]:
    """What it says that it needs, in a line `Needs: NAME, NAME`, and cannot be imported here."""
    found = re.search(r"^Needs: (.*?)\.?$", example.read_text(), re.M)
    names = found[1].split(", ") if found else []
    assert all(name.isidentifier() for name in names)  # modules, not packages such as scikit-learn
    return [name for name in names if importlib.util.find_spec(name) is None]


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    if names := missing(example):
        pytest.skip(f"not installed: {', '.join(names)}")
    if example.stem in LESS:
        text, less = example.read_text(), LESS[example.stem]
        assert text.count(less[0]) == 1
        example = tmp_path / example.name
        example.write_text(text.replace(*less))
    code, out, err = run_file(example, cwd=tmp_path)
    assert code == 0, out + err
    assert out
    assert "Traceback" not in err


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_answers_a_question(example: Path) -> None:
    text = example.read_text()
    assert text.count("\n") <= LINES_MAX
    assert (ast.get_docstring(ast.parse(text)) or "").split("\n")[0].endswith("?")


def test_they_are_there() -> None:
    assert len(EXAMPLES) >= 7
