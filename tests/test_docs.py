"""The pages of the API show what a user may call, and are made without a warning."""

from __future__ import annotations

import dataclasses
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hoplite_mp import Config

ROOT = Path(__file__).resolve().parent.parent
CALLS = (
    "allreduce", "reduce", "broadcast", "gather", "allgather", "reduce_scatter", "alltoall",
    "barrier", "scatter", "scan", "exscan",
)  # fmt: skip
MESSAGES = ("send", "recv", "recv_async", "sendrecv", "probe", "split", "close")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("pdoc", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("pages")
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "pages.py"), str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert made.returncode == 0, made.stderr
    assert "Warn" not in made.stderr
    return (folder / "hoplite_mp.html").read_text()


def test_what_the_pages_show(page: str) -> None:
    wanted = [f"{name}.{call}" for name in ("Cluster", "Executor") for call in ("submit", "map")]
    wanted += [f"Group.{name}" for name in ("rank", "size", "calls", "contributors", "alive")]
    wanted += [f"Group.{call}{form}" for call in CALLS for form in ("", "_async")]
    wanted += [f"Group.{name}" for name in MESSAGES]
    wanted += [f"Config.{field.name}" for field in dataclasses.fields(Config)]
    shown = set(re.findall(r'id="([\w.]+)"', page))
    assert [name for name in wanted if name not in shown] == []
    assert "Group.__init__" not in shown


def test_fields_have_their_words(page: str) -> None:
    words = html.unescape(re.sub("<[^>]+>", "", page))
    assert "How long a put waits for room in a full store before StoreFullError." in words
    assert "HOPLITE_MP_<FIELD>, else the defaults" in words


def test_the_table_of_failures_names_tests_that_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "failures.md").read_text())
    assert len(named) > 20
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
