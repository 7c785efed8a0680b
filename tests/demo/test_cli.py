"""The command: its options, its version, and what it says when the extra is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hoplite_mp._cli import main
from hoplite_mp._cli.demo import main as demo_main
from hoplite_mp._cli.demo.training import TrainingPlan
from hoplite_mp._version import __version__


@pytest.fixture(name="calls")
def fixture_calls(monkeypatch) -> list[tuple[TrainingPlan, Path | None]]:
    calls: list[tuple[TrainingPlan, Path | None]] = []

    def demo(plan: TrainingPlan, out: Path | None = None) -> int:
        calls.append((plan, out))
        return 0

    monkeypatch.setattr(demo_main, "demo", demo)
    return calls


def test_version(capsys):
    with pytest.raises(SystemExit) as leaving:
        main.main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"hoplite-mp {__version__}\n"


def test_version_of_the_module():
    command = [sys.executable, "-m", "hoplite_mp", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"hoplite-mp {__version__}\n"


def test_no_command_shows_help(capsys):
    assert main.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_demo_defaults(calls):
    assert main.main(["demo"]) == 0
    assert calls == [(TrainingPlan(workers=4), None)]
    assert calls[0][0].kill


def test_demo_options(calls):
    assert (
        main.main(["demo", "--workers", "3", "--steps", "50", "--no-kill", "--out", "there"]) == 0
    )
    assert calls == [(TrainingPlan(workers=3, steps=50, kill=False), Path("there"))]


@pytest.mark.parametrize("option", ["--workers=0", "--steps=-3", "--steps=x", "--nonsense"])
def test_wrong_options(option, calls, capsys):
    with pytest.raises(SystemExit) as leaving:
        main.main(["demo", option])
    assert leaving.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err
    assert calls == []


def test_what_workers_may_be(calls, capsys):
    with pytest.raises(SystemExit):
        main.main(["demo", "--workers", "abc"])
    assert "must be a whole number above 0, not 'abc'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["sklearn", "rich", "matplotlib"])
def test_missing_extra(module, monkeypatch, calls, capsys):
    monkeypatch.setattr(main, "_importable", lambda name: name != module)
    assert main.main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"hoplite-mp demo needs {main.DEMO_NEEDS[module]}: pip install 'hoplite-mp[demo]'\n"
    )
    assert calls == []


def test_importable():
    assert main._importable("json")
    assert not main._importable("no_such_module_anywhere")


def test_the_command_needs_no_extra_to_start():
    code = (
        "import sys, hoplite_mp._cli.main as cli; cli.parser();"
        "print([name for name in cli.DEMO_NEEDS if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_out_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert demo_main.demo(TrainingPlan(), tmp_path / "file") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "--out" in line
