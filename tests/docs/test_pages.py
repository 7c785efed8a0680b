"""The documentation is built without a warning, and shows what a user may call."""

from __future__ import annotations

import dataclasses
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hoplite_mp
from hoplite_mp._cli.main import parser
from tests.support.documents import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
CALLS = (
    "allreduce", "reduce", "broadcast", "gather", "allgather", "reduce_scatter", "alltoall",
    "barrier", "scatter", "scan", "exscan",
)  # fmt: skip
# Building the pages takes a minute of a processor that others use, too.
pytestmark = pytest.mark.timeout(600)
MESSAGES = ("send", "recv", "recv_async", "sendrecv", "probe", "split", "close")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html"),
            *("-d", str(folder / "trees"), str(ROOT / "docs"), str(folder / "pages")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # Warnings about Sphinx's own code are not errors of the pages.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""},
    )
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return folder / "pages"


def shown(site: Path) -> set[str]:
    pages = (site / "reference").glob("*.html")
    return {name for page in pages for name in re.findall(r'id="([\w.-]+)"', page.read_text())}


def words(page: Path) -> str:
    return html.unescape(re.sub("<[^>]+>", "", page.read_text()))


def test_what_the_pages_show(site: Path) -> None:
    wanted = [f"{name}.{call}" for name in ("Cluster", "Executor") for call in ("submit", "map")]
    wanted += [f"Group.{name}" for name in ("rank", "size", "calls", "contributors", "alive")]
    wanted += [f"Group.{call}{form}" for call in CALLS for form in ("", "_async")]
    wanted += [f"Group.{name}" for name in MESSAGES]
    wanted += [name for name in hoplite_mp.__all__]
    wanted += [name for name in PUBLIC if name.split(".")[0] in hoplite_mp.__all__]
    there = shown(site)
    assert [name for name in wanted if f"hoplite_mp.{name}" not in there] == []
    assert "hoplite_mp.Group.__init__" not in there


def test_every_limit_has_its_row(site: Path) -> None:
    there = shown(site)
    rows = [f"config-{f.name.replace('_', '-')}" for f in dataclasses.fields(hoplite_mp.Config)]
    assert [row for row in rows if row not in there] == []
    text = words(site / "reference" / "config.html")
    assert "How long a put waits for space in a full store before StoreFullError." in text


def test_every_command_has_its_options(site: Path) -> None:
    text = words(site / "reference" / "command_line.html")
    actions = [action for action in parser()._actions if action.dest == "command"]
    for name in actions[0].choices or ():
        assert f"usage: hoplite-mp {name}" in text


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    ours = [link for link in links if "://" not in link]
    assert len(ours) > 10
    assert [link for link in ours if not (ROOT / link).exists()] == []


def test_the_table_of_failures_names_tests_that_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "failures.md").read_text())
    assert len(named) > 20
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_every_file_says_what_it_is_for(site: Path) -> None:
    listed = words(site / "files.html")
    files = [
        path
        for folder, kinds in (("hoplite_mp", ["*.py"]), ("cext", ["*.pyx", "*.pxi", "*.[ch]"]))
        for kind in kinds
        for path in (ROOT / folder).rglob(kind)
    ]
    assert len(files) > 400
    assert [path.name for path in files if f"{path.name}: " not in listed] == []


def test_files_are_found_by_words() -> None:
    for asked, answer in (
        ("silence beats", "hoplite_mp/_manager/heartbeats.py"),
        ("crc32c check", "cext/engine_crc.c"),
    ):
        found = subprocess.run(
            [sys.executable, str(ROOT / "docs" / "list_files.py"), *asked.split()],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        assert answer in [line.partition(": ")[0] for line in found]
        assert len(found) < 20


def test_board_methods_that_the_page_on_the_gil_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    code = (ROOT / "cext" / "tasks_boards.pxi").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| Group boards")]
    assert rows
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[2]):
            assert f"def {name}(" in code, name
