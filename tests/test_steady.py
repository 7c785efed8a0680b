"""`make steady` with a command that only pretends: what it records, and where it goes on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEADY = Path(__file__).with_name("steady.py")
GREEN = "echo '====== 7 passed, 2 skipped, 1 deselected in 3.05s (0:00:03) ======'"
MYPY = "echo 'Found 3 errors in 1 file (checked 9 source files)'"
RED = f"{GREEN}; echo 'FAILED tests/a.py::test_b[x y] - AssertionError: no'; {MYPY}; exit 2"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit, which ignores what is recorded."""
    (tmp_path / ".gitignore").write_text(".steady/\n")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture(autouse=True)
def stress_that_only_sleeps(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processors are for the other tests."""
    program = tmp_path_factory.mktemp("path") / "stress-ng"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def words(shell: str, *options: str) -> list[str]:
    command = f"sh -c {shlex.quote(shell)}"
    return [sys.executable, str(STEADY), "--command", command, *options]


def steady(tree: Path, shell: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(shell, *options), cwd=tree, capture_output=True, text=True, timeout=60
    )


def recorded(tree: Path) -> list[dict[str, object]]:
    files = list((tree / ".steady").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_six_green_runs_three_of_them_busy(tree: Path) -> None:
    done = steady(tree, GREEN)
    assert done.returncode == 0, done.stdout + done.stderr
    found = recorded(tree)
    assert [one["conditions"] for one in found] == ["busy"] * 3 + ["alone"] * 3
    assert {(one["passed"], one["failed"], one["skipped"]) for one in found} == {(7, 0, 2)}
    assert all(one["load"] == "stress-ng --cpu 4 + joblib" for one in found[:3])
    assert done.stdout.count("  green") == 6
    again = steady(tree, "exit 1")  # nothing is left to run
    assert again.returncode == 0
    assert "run 1:" not in again.stdout


def test_one_red_run_is_named_and_not_forgotten(tree: Path) -> None:
    mark = tree / ".steady" / "second"
    done = steady(tree, f"[ -e {mark} ] && {{ {GREEN}; exit; }}; touch {mark}; {RED}")
    assert done.returncode == 1
    assert "run 1 failed: tests/a.py::test_b[x y]" in done.stdout
    assert done.stdout.count("  green") == 5
    assert [one["failed"] for one in recorded(tree)] == [0] * 6
    assert steady(tree, GREEN).returncode == 1
    assert steady(tree, GREEN, "--again").returncode == 0


def test_it_goes_on_where_it_was_stopped(tree: Path) -> None:
    begun = tree / ".steady" / "begun"
    hangs = f"[ -e {begun}3 ] && exec sleep 60; [ -e {begun}2 ] && touch {begun}3; touch {begun}2; "
    process = subprocess.Popen(
        words(hangs + GREEN), cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("run 3"):
            break
    time.sleep(0.2)  # into that run, or just ahead of it: it counts in neither case
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(recorded(tree)) == 2
    done = steady(tree, GREEN)
    assert done.returncode == 0
    assert "run 3:" in done.stdout
    assert "run 2:" not in done.stdout


def test_a_run_that_hangs_has_failed(tree: Path) -> None:
    mark = tree / ".steady" / "second"
    done = steady(tree, f"[ -e {mark} ] || {{ touch {mark}; sleep 60; }}; {GREEN}", "--longest=2")
    assert done.returncode == 1, done.stdout + done.stderr
    first, *others = [one["code"] for one in recorded(tree)]
    assert first == 124
    assert 0 in others  # on a busy machine not all of them end in time
    assert {*others} <= {0, 124}


def test_a_tree_that_is_not_clean(tree: Path) -> None:
    (tree / "new").touch()
    done = steady(tree, GREEN)
    assert done.returncode == 2
    assert "not clean" in done.stderr
    assert "?? new" in done.stderr
    assert not recorded(tree)


def test_a_run_that_changes_the_tree_does_not_count(tree: Path) -> None:
    done = steady(tree, f"touch left; {GREEN}")
    assert done.returncode == 2
    assert "?? left" in done.stderr
    assert not recorded(tree)


def test_without_stress_ng_it_says_what_it_does_instead(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree / ".steady"
    folder.mkdir()
    for name in ("git", "sh", "echo"):
        found = next(p for p in os.environ["PATH"].split(":") if (Path(p) / name).exists())
        (folder / name).symlink_to(Path(found) / name)
    monkeypatch.setenv("PATH", str(folder))
    done = steady(tree, GREEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no stress-ng (apt install stress-ng): our own loops instead" in done.stdout
    assert "loop 1 + loop 2 + loop 3 + loop 4 + joblib" in done.stdout
