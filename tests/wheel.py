"""`make test-wheel`: the wheel, in an empty environment, tested without the checkout's package.

`make test` runs from the source tree, which has everything; what is published must work where there
is nothing else. For each interpreter named (by default: every CPython from 3.11 on that is found
here), the wheel is built from the sdist, installed into a new environment with what the tests need,
and the tests of some folders run from a copy of tests/ and of the pages they read.

    python tests/wheel.py [--folders tests/store ...] [PYTHON ...]
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["tests/serial", "tests/store", "tests/collectives", "tests/actors"]
COPIED = ["tests", "docs"]  # some tests run what a page shows
NEEDED = [
    *("hypothesis", "ml_dtypes", "msgspec", "pandas", "psutil", "pyarrow", "pytest"),
    *("pytest-timeout", "pytest-xdist"),
]
PLACES = ("~/.pyenv/versions/*/bin/python3", "/usr/bin/python3.1?", "/usr/local/bin/python3.1?")
ABOUT = (
    "import sys, sysconfig;"
    "print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
)


def found_here() -> list[str]:
    """One interpreter of each version that the library is for, and of each kind."""
    kinds: dict[str, str] = {}
    for pattern in PLACES:
        for path in sorted(glob.glob(os.path.expanduser(pattern))):
            done = subprocess.run([path, "-c", ABOUT], capture_output=True, text=True)
            if done.returncode == 0 and tuple(map(int, done.stdout.split()[:2])) >= (3, 11):
                kinds.setdefault(done.stdout, path)
    return list(kinds.values()) or [sys.executable]


def tested(python: str, sdist: Path, folders: list[str], place: Path) -> bool:
    """Whether the wheel that this interpreter builds passes the tests of these folders."""
    subprocess.run([python, "-m", "venv", str(place / "venv")], check=True)
    own = str(place / "venv" / "bin" / "python")
    pip = [own, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(place / "dist"), str(sdist)], check=True)
    (wheel,) = (place / "dist").glob("*.whl")
    subprocess.run([*pip, "install", str(wheel)], check=True)
    subprocess.run(
        [own, "-c", "import _hoplite_mp_torch, hoplite_mp._pages"], check=True, cwd=place
    )
    subprocess.run([*pip, "install", *NEEDED], check=True)
    for folder in COPIED:
        left_out = shutil.ignore_patterns("__pycache__", "_build")
        shutil.copytree(ROOT / folder, place / folder, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", place)
    command = [own, "-P", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *folders]
    return subprocess.run(command, cwd=place).returncode == 0


def main() -> int:
    """All interpreters; exit code 1 if one of them fails."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("pythons", nargs="*", metavar="PYTHON")
    options.add_argument("--folders", nargs="+", default=FOLDERS)
    given = options.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as outside:
        build = [sys.executable, "-m", "build", "--sdist", "--outdir", outside, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (sdist,) = Path(outside).glob("*.tar.gz")
        for number, python in enumerate(given.pythons or found_here()):
            place = Path(outside) / str(number)
            place.mkdir()
            results[python] = tested(python, sdist, given.folders, place)
    for python, good in results.items():
        print("passed" if good else "FAILED", python)
    return not all(results.values())


if __name__ == "__main__":
    sys.exit(main())
