"""`make test-python VERSION=3.15`: the whole test suite under another version of Python.

The interpreter is one of this machine, where there is one of that version. Otherwise it is
Debian's, from the unstable suite, in a root directory that debootstrap makes (as root; kept below
.pythons/). The suite runs from a copy of the files that git tracks, as they are in the working
tree, with warnings as errors in pytest and in every process that a test starts.

    python tests/python_version.py VERSION [--again] [PYTEST-ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".pythons"  # not tracked; `--again` makes a version's folder anew
PLACES = ("~/.pyenv/versions/{}.*/bin/python3", "/usr/bin/python{}", "/usr/local/bin/python{}")
SUITE = "sid"
# As in pyproject.toml, for the processes that tests start.
WARNINGS = "error,ignore:This process (pid=:DeprecationWarning"
# Beside the interpreter: what builds the modules, emulates hosts, and asks about processes.
PACKAGES = (
    *("python{0}", "python{0}-dev", "python{0}-venv", "libpython{0}-testsuite"),
    *("ca-certificates", "gcc", "git", "iproute2", "make", "openssh-client", "openssl", "procps"),
)
# From the machine: how names are resolved, and how pip reaches its index.
SHARED_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
# $0 is the root directory, "$@" the command. A mount namespace of its own ends with the command.
ENTER = """
set -e
mount --bind "$0" "$0"
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/run"
mount --bind "$CHECKOUT" "$0/checkout"
for file in $SHARED; do touch "$0$file"; mount --bind "$file" "$0$file"; done
# Not chroot: programs in a chroot cannot unshare mounts, and /proc/self/maps shows other paths.
cd "$0"
mkdir -p outside
pivot_root . outside
umount -l /outside
exec /usr/bin/env --chdir=/checkout "$@"
"""


def on_this_machine(version: str) -> str | None:
    """The path of an interpreter of this version whose headers are here too."""
    check = "import os, sysconfig as s; assert os.path.exists(s.get_path('include') + '/Python.h')"
    for place in PLACES:
        for path in sorted(glob.glob(os.path.expanduser(place.format(version))), reverse=True):
            if subprocess.run([path, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
                return path
    return None


def debian_root(version: str, place: Path) -> Path:
    """A root directory of Debian's unstable suite with this version; made when it is not there."""
    root = place / "root"
    if (root / "usr/bin" / f"python{version}").exists():
        return root
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        sys.exit(
            f"There is no Python {version} here (looked at {', '.join(PLACES).format(version)})."
            " Install it, or run this as root with debootstrap installed: Debian's unstable suite"
            " has the current versions."
        )
    shutil.rmtree(root, ignore_errors=True)
    packages = ",".join(PACKAGES).format(version)
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root)], check=True
    )
    (root / "checkout").mkdir(exist_ok=True)
    return root


def copy_checkout(place: Path) -> Path:
    """A fresh copy of the tracked files, as they are in the working tree."""
    copy = place / "checkout"
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def steps(python: str, venv: str, arguments: list[str]) -> str:
    """The shell commands that install the checkout into an environment and run the suite."""
    run = [f"{venv}/bin/python", "-P", "-m", "pytest", *arguments]
    return "\n".join(
        (
            "set -e",
            f"[ -e {venv}/.made ] || {python} -m venv {venv}",
            f"touch {venv}/.made",
            f"{venv}/bin/python -m pip install --quiet --editable '.[dev]'"
            " --config-settings editable_mode=compat",
            f"{venv}/bin/python -VV",
            f"PYTHONWARNINGS={shlex.quote(WARNINGS)} OPENBLAS_THREAD_TIMEOUT=4 {shlex.join(run)}",
        )
    )


def main() -> int:
    """Exit code of the suite."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("version", help="for example 3.15")
    parser.add_argument("--again", action="store_true", help="make the environment anew")
    given, arguments = parser.parse_known_args()
    place = KEPT / given.version
    if given.again:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    # Each of the thousands of processes would compile our modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = arguments or ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    python = on_this_machine(given.version)
    if python is not None:
        script = steps(python, str(place / "venv"), arguments)
        return subprocess.run(["sh", "-c", script], cwd=copy_checkout(place)).returncode
    root = debian_root(given.version, place)
    shared = [file for file in SHARED_FILES if os.path.exists(file)]
    environment = os.environ | {
        "CHECKOUT": str(copy_checkout(place)),
        "SHARED": " ".join(shared),
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    inside = ["sh", "-c", steps(f"python{given.version}", "/venv", arguments)]
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, str(root)]
    return subprocess.run([*enter, *inside], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
