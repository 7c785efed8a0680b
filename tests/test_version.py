"""Platforms on which the package warns, or refuses to be imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

FREE_THREADED = "import sys; sys._is_gil_enabled = lambda: False\n"
GIL_FORCED_OFF = """
real = sys.flags
sys.flags = type("Flags", (), {"__getattr__": lambda _, name: getattr(real, name), "gil": 0})()
"""
COUNT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import hoplite_mp
    compiled = [name for name in sys.modules if name in
        [f"hoplite_mp.{one}" for one in ("_engine", "_pages", "_reduce", "_shm", "_tasks")]]
    hoplite_mp.Config
    import hoplite_mp.errors
print(len(caught), compiled, caught[0].category.__name__, caught[0].message)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_import_on_a_free_threaded_build_warns_once_before_compiled_modules_load() -> None:
    done = run(FREE_THREADED + COUNT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 [] RuntimeWarning hoplite_mp turns the GIL on"), done.stdout
    assert "PYTHON_GIL=1" in done.stdout
    assert done.stdout.count(". ") == 0  # one sentence


def test_import_with_the_gil_forced_off_is_refused() -> None:
    done = run(FREE_THREADED + GIL_FORCED_OFF + "import hoplite_mp")
    assert done.returncode == 1
    assert "ImportError: hoplite_mp cannot run without the GIL" in done.stderr


@pytest.mark.parametrize("build", [FREE_THREADED, FREE_THREADED + GIL_FORCED_OFF])
def test_entry_point_of_torch_loads_on_a_free_threaded_build(build: str) -> None:
    """torch loads it whenever it is imported, and then fails itself if that raises."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    value = project["entry-points"]["torch.backends"]["hoplite"]
    point = f"EntryPoint('hoplite', {value!r}, 'torch.backends')"
    load = f"import warnings; warnings.simplefilter('error'); {point}.load()"
    done = run(f"{build}from importlib.metadata import EntryPoint; {load}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [[], ["-W", "error"]])
def test_import_on_a_standard_build_warns_of_nothing(options: list[str]) -> None:
    command = [sys.executable, *options, "-c", "import hoplite_mp; hoplite_mp.Cluster"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
