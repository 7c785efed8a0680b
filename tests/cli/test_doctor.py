"""`hoplite-mp doctor` as a command: its table, its exit code, what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli import main
from tests.lan import forked
from tests.support.clusters import PATIENCE_S, ROOT, TOKEN

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command; `before`: shell commands in the same process, for its limits."""
    command = [sys.executable, "-m", "hoplite_mp", "doctor", *words]
    if before:
        command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
    return forked.run(command, env={**os.environ, **environment}, cwd=ROOT, timeout=PATIENCE_S)


def here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and stdout of the command in this process."""
    code = main.main(["doctor", *words])
    return code, capsys.readouterr().out


def levels(text: str) -> dict[str, str]:
    """The level of each subject, the worst if there are several."""
    order = ("ok", "warning", "problem")
    found: dict[str, str] = {}
    for line in text.splitlines():
        level, *rest = line.split("  ", 1)
        if level in order and rest:
            what = rest[0].strip().split("  ")[0]
            found[what] = max(level, found.get(what, "ok"), key=order.index)
    return found


def test_this_host() -> None:
    """It starts a real cluster, and this host is good enough for the other tests."""
    done = run()
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    found = levels(done.stdout)
    assert {"software", "kernel", "memory", "spilling", "token"} <= found.keys()
    assert {"start", "tasks", "objects"} <= found.keys()
    assert "64 MiB stored at" in done.stdout
    assert "problem" not in found.values()
    assert done.stdout.splitlines()[-1].startswith("no problems")


def test_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = here(capsys, "--no-start")
    assert code == 0, out
    assert "start" not in levels(out)


def test_limits_of_this_process() -> None:
    done = run("--no-start", before="ulimit -Sn 40; ulimit -Hn 40; ulimit -v 4000000")
    assert done.returncode == 1
    found = levels(done.stdout)
    assert found["open files"] == found["address space"] == "problem"
    assert "2 problems" in done.stdout.splitlines()[-1]


def test_address_space_that_fits_a_smaller_store_is_no_problem() -> None:
    done = run("--no-start", before="ulimit -v 40000000")
    assert levels(done.stdout)["address space"] == "ok", done.stdout


def test_one_wrong_setting_is_one_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPLITE_MP_RETRIES", "many")
    code, out = here(capsys, "--no-start")
    assert code == 1
    assert out.splitlines()[-1].startswith("1 problem")


def test_a_cluster(running: str) -> None:
    done = run(running, "--no-tls", HOPLITE_MP_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout
    found = levels(done.stdout)
    assert found["connection"] == found["handshake"] == found["versions"] == found["nodes"] == "ok"
    assert TOKEN not in done.stdout


def test_a_cluster_that_is_not_joined(
    capsys: pytest.CaptureFixture[str], running: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    code, out = here(capsys, running, "--no-tls", "--no-start", "--token-file", str(file))
    assert code == 0, out
    assert levels(out)["handshake"] == "ok"
    assert "nodes" not in levels(out)


@pytest.mark.parametrize("module", ["doctor.main", "bench.host"])
def test_no_extra_is_needed(module: str) -> None:
    code = (
        f"import sys, hoplite_mp._cli.{module}; "
        "print([name for name in ('rich', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
