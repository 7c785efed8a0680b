"""What deploy/ holds is started here as far as this machine can: commands, not their managers."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hoplite_mp._cli.main import parser

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = """
import faulthandler, os, sys, time, hoplite_mp
faulthandler.dump_traceback_later(80, exit=True)
end = time.monotonic() + 60
with hoplite_mp.Cluster(address=os.environ["HOPLITE_MP_ADDRESS"]) as c:
    while len(c.nodes) < {nodes}:
        if time.monotonic() > end:
            sys.exit("only " + str(c.nodes))
        time.sleep(0.05)
    names = [c.options(node=node).submit(os.getppid).result() for node in c.nodes]
    print(len(set(names)), "nodes worked")
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on PATH with `hoplite-mp`, `python` and a token's place of the test's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in {"hoplite-mp": "-m hoplite_mp", "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        script.chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("HOPLITE_MP_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HOPLITE_MP_MEMORY_BYTES", "128MiB")
    monkeypatch.setenv("HOPLITE_MP_HEARTBEAT_TIMEOUT_S", "60")  # however long a node has to wait
    return folder


def of_unit(unit: Path) -> list[str]:
    """The words after the name of the program that the unit starts."""
    read = configparser.ConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read(unit)
    return shlex.split(read["Service"]["ExecStart"])[1:]


def of_service(name: str) -> list[str]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return list(services[name]["command"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_is_one_for_systemd(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    text = unit.read_text().replace("/opt/hoplite_mp/bin/hoplite-mp", "/bin/true")
    (tmp_path / unit.name).write_text(text.replace("User=hoplite", "User=root"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
    )
    ours = [line for line in checked.stderr.splitlines() if unit.name in line]
    assert not ours, ours


@pytest.fixture
def started(commands: Path, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.terminate()
    for process in running:
        process.communicate()


def on_loopback(words: list[str], address: str, token: Path) -> list[str]:
    """The same command, with the addresses and the file of this test."""
    replaced = [re.sub(r"^(192\.168\.1\.10|head):7000$", address, word) for word in words]
    replaced[replaced.index("--token-file") + 1] = str(token)
    if "--ports" in replaced:
        del replaced[(at := replaced.index("--ports")) : at + 2]  # all are on one host here
    if "--workers" not in replaced:
        replaced += ["--workers", "1"]
    return replaced


@pytest.mark.parametrize("kind", ["systemd", "compose"])
def test_its_commands_make_a_cluster(
    kind: str, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    if kind == "systemd":
        commands = [of_unit(DEPLOY / f"hoplite-mp-{name}.service") for name in ("up", "join")]
    else:
        commands = [of_service(name) for name in ("head", "second", "third")]
    token, address = tmp_path / "token", "127.0.0.1:0"
    for words in commands:
        parser().parse_args(words)
        command = ["hoplite-mp", *on_loopback(words, address, token)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        started.append(subprocess.Popen(command, **pipes))
        line = started[-1].stdout.readline()  # type: ignore[union-attr]
        address = re.findall(r"127\.0\.0\.1:\d+", line)[0]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(nodes=len(commands))],
        env={**os.environ, "HOPLITE_MP_ADDRESS": address, "HOPLITE_MP_TOKEN_FILE": str(token)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{len(commands)} nodes worked\n", done.stderr


SRUN = """
#!/bin/sh
# Stands for srun: so many tasks, all on this host.
for word in "$@"; do case "$word" in --ntasks=*) tasks="${word#--ntasks=}";; esac; done
while [ "${1#--}" != "$1" ]; do shift; done
n=0
while [ "$n" -lt "$tasks" ]; do "$@" & n=$((n + 1)); done
wait
"""


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_a_job_of_slurm(nodes: int, commands: Path, tmp_path: Path) -> None:
    (commands / "srun").write_text(textwrap.dedent(SRUN).lstrip())
    (commands / "srun").chmod(0o755)
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(nodes=nodes))
    done = subprocess.run(
        [str(DEPLOY / "job.sbatch"), str(program)],
        cwd=tmp_path,
        env={
            **os.environ,
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_NNODES": str(nodes),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "HOPLITE_MP_HEAD": "127.0.0.1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{nodes} nodes worked\n" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.glob(".hoplite-mp-token-*"))


def test_the_image_is_made_of_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r'ENTRYPOINT \["hoplite-mp"\]', text)
    default = re.findall(r'CMD \["(\w+)"\]', text)
    parser().parse_args(default)
    for extra in re.findall(r"\[(\w+)\]\"", text):
        assert f"\n{extra} = " in (ROOT / "pyproject.toml").read_text()
