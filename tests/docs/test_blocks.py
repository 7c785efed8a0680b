"""Every block of code in the README and on the pages is run, or at least read by what it is for.

A page is a program: its blocks in Python run one after the other in one process, in a directory of
their own; on a page that says `<!-- every block is a program -->` each of them is one. A block
whose first line is `# needs: NAME` is a program, too, and left out where that package cannot be
imported, after a look at its syntax. Each gets the argument 300, which the longer ones take for the
number of steps. Where a page names the address of a cluster, there is one. Blocks of the shell are
not run: their commands are given to the command line's own parser, or must be targets of the
Makefile.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli.main import parser
from tests.lan import forked
from tests.support.documents import EXAMPLE_ADDRESS, PAGES, PROGRAMS, ROOT, blocks, run_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLE_HOSTS = '["192.168.1.11", "user@192.168.1.12"]'
SHELLS = ("sh", "console", "bash")
TALK = ("{", "text", "")  # directives, drawings
# Commands of the pages that belong to others: pip, ssh and so on.
OTHERS = {
    "cd", "chmod", "cp", "dask", "docker", "export", "git", "head", "kill", "pip", "pstree", "ray",
    "py-spy", "python", "python3", "rsync", "sbatch", "scp", "srun", "ssh", "sudo", "systemctl",
    "useradd",
}  # fmt: skip


SHELL_LINES = [
    pytest.param(line, id=f"{page.stem}-{block.line}-{number}")
    for page in PAGES
    for block in blocks(page)
    if block.language in SHELLS
    for number, line in enumerate(block.text.replace("\\\n", " ").splitlines())
    if line.split("#")[0].strip()
]


@pytest.fixture(scope="module", autouse=True)
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster for the pages that name one."""
    token = tmp_path_factory.mktemp("token") / "token"
    command = [sys.executable, "-m", "hoplite_mp", "up", "--listen", "127.0.0.1:0"]
    with forked.popen(
        [*command, "--workers", "2", "--token-file", str(token)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOPLITE_MP_TOKEN_FILE", str(token))
            yield re.findall(r"127\.0\.0\.1:\d+", line)[0]
        process.terminate()


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, address: str, tmp_path: Path) -> None:
    page, text = PROGRAMS[name]
    text = EXAMPLE_ADDRESS.sub(address, text)
    environment = {}
    if EXAMPLE_HOSTS in text:
        text = text.replace(EXAMPLE_HOSTS, '["127.0.0.1"]')
        command = f"env HOST={{host}} {shlex.quote(sys.executable)} -m hoplite_mp {{arguments}}"
        environment["HOPLITE_MP_HOSTS_COMMAND"] = command
    program = tmp_path / f"{name}.py"
    program.write_text(text)
    code, out, err = run_file(program, "300", cwd=tmp_path, **environment)
    assert code == 0, f"{page}:\n{out}\n{err}"
    assert "Traceback" not in err, f"{page}:\n{err}"


@pytest.mark.parametrize("line", SHELL_LINES)
def test_a_command(line: str) -> None:
    words = shlex.split(line.removeprefix("$ "), comments=True)
    while "=" in words[0] or words[0] == "sudo":
        words = words[1:]
    command, rest = os.path.basename(words[0]), words[1:]
    if command == "hoplite-mp":
        parser().parse_args([word for word in rest if word != "&"])
    elif command == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(rest) <= set(targets)
    else:
        assert command in OTHERS, f"nobody here knows {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        known = block.language in ("python", *SHELLS, "toml", "ini", "yaml", "dockerfile", "diff")
        assert known or block.language.startswith("{") or block.language in TALK, (
            f"{page}:{block.line - 1}: {block.language!r}"
        )


def test_they_were_found() -> None:
    assert len(PROGRAMS) > 5
    assert len(SHELL_LINES) > 5


def test_the_changes_that_contributors_are_shown_fit_the_files() -> None:
    """Each unchanged line of a diff stands in a file that the page names."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    named = [ROOT / name for name in re.findall(r"`(hoplite_mp/[\w/]+\.py)`", page)]
    lines = {line.strip() for file in named for line in file.read_text().splitlines()}
    diffs = re.findall(r"^ *```diff\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    kept = [line.strip() for diff in diffs for line in diff.splitlines() if line[3:4] == " "]
    assert kept
    assert lines.issuperset(kept)
