"""The checks after each test blame what this run has made, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INNER = """
import os
import subprocess, sys, time
from hypothesis import given, strategies

@given(strategies.integers(0, 2))
def test_an_example_may_wait(number):
    time.sleep(0.25)  # for a processor

def test_leaves_a_name():
    name = f"/dev/shm/left-by-a-test-{os.getpid()}"
    open(name, "w").close()
    held.append(open(name))
    os.environ["LEFT"] = name

held = []

def test_a_program_can_be_interrupted():
    code = "import signal; assert signal.getsignal(2) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_while_others_work():
    path = os.environ["OUTSIDE"]
    subprocess.run(["nsenter", "-t", os.environ["STRANGER"], "-m", "touch", path], check=True)
    assert not os.path.exists(path)
"""


def inner(
    tmp_path: Path, which: str, *starter: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A run of its own, under the same checks."""
    checks = (ROOT / "tests/conftest.py").read_text()
    checks = re.sub(r"^GRACE_S = .*", "GRACE_S = 1.0", checks, flags=re.MULTILINE)
    (tmp_path / "conftest.py").write_text(checks)
    (tmp_path / "test_inner.py").write_text(INNER)
    return subprocess.run(
        [
            *starter,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--execute",
            "-p",
            "no:cacheprovider",
            "-k",
            which,
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_what_a_test_leaves_is_found(tmp_path: Path) -> None:
    done = inner(tmp_path, "test_leaves_a_name")
    assert done.returncode == 1
    assert "entries in /dev/shm stayed behind: ['left-by-a-test-" in done.stdout
    for path in Path("/dev/shm").glob("left-by-a-test-*"):  # where it is not private
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="entering another mount namespace needs root")
def test_what_other_programs_leave_is_not(tmp_path: Path) -> None:
    """Another program, in this process's /dev/shm, makes a name while a test runs."""
    path = f"/dev/shm/of-a-stranger-{os.getpid()}"
    environment = {"OUTSIDE": path, "STRANGER": str(os.getpid())}
    try:
        done = inner(tmp_path, "test_while_others_work", **environment)
        if (
            "nsenter" in done.stdout
            and "failed" in done.stdout.lower()
            and not os.path.exists(path)
        ):
            pytest.skip("namespaces are not permitted")
        assert os.path.exists(path)
        assert done.returncode == 0, done.stdout
    finally:
        Path(path).unlink(missing_ok=True)


def test_a_run_in_the_background(tmp_path: Path) -> None:
    """Started by a shell that has it ignore Ctrl-C."""
    starter = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    done = inner(tmp_path, "test_a_program_can_be_interrupted", *starter)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_examples_have_no_deadline(tmp_path: Path) -> None:
    done = inner(tmp_path, "test_an_example_may_wait")
    assert done.returncode == 0, done.stdout


def test_levels_name_existing_files(pytestconfig: pytest.Config) -> None:
    checks = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    assert checks is not None
    for path in (*checks.LEVEL_OF, *checks.SLOW):
        assert (ROOT / "tests" / path).exists(), path


def test_level_is_that_of_the_longest_path(pytestconfig: pytest.Config) -> None:
    checks = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    assert checks is not None
    assert checks.level_of(ROOT / "tests/serial/test_arrays.py") == "unit"
    assert checks.level_of(ROOT / "tests/serial/test_main.py") == "component"
    assert checks.level_of(ROOT / "tests/tasks/test_map.py") == "system"
    assert checks.level_of(ROOT / "tests/lan/test_hosts.py") == "lan"
