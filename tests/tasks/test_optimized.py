"""`python -OO`, `PYTHONOPTIMIZE=2`: no docstrings, and no assert is executed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hoplite_mp

PACKAGE = Path(hoplite_mp.__file__).parent
PURE = {"is_joining", "isinstance", "len"}  # functions without effects, which an assert may call
COMMANDS = ("", "up", "join", "status", "top", "dump", "doctor", "bench", "simulate", "demo")
PROGRAM = """
import numpy as np
import hoplite_mp
import optimized_module

class Counter:
    def __init__(self):
        self.n = 0
    def add(self, x):
        self.n += x
        return self.n

def peer(rank):
    group = hoplite_mp.current().group("g", 2, rank)
    return float(group.allreduce(np.full(100_000, float(rank))).sum())

def items():
    yield from range(3)

assert False, "this program is optimized"
with hoplite_mp.Cluster(2) as c:
    assert_off = [c.submit(optimized_module.asserts).result()]
    with c.options(env={"A": "B"}).executor(1) as own:
        assert_off.append(own.submit(optimized_module.asserts).result())
    counter = c.actor(Counter)
    total = c.get(c.reduce([c.put(np.ones(10)) for _ in range(3)]))
    queue = hoplite_mp.Queue()
    queue.put(3)
    print(
        assert_off,
        list(c.map(abs, range(-3, 0))),
        [counter.add(1).result() for _ in range(3)],
        [one.result() for one in c.spmd(peer, 2)],
        c.get(list(c.stream(items))),
        total.tolist() == [3.0] * 10,
        queue.get(),
        hoplite_mp.Config.__doc__,
        hoplite_mp.Config(retries=1).retries,
    )
"""
EXPECTED = "[True, True] [3, 2, 1] [1, 2, 3] [100000.0, 100000.0] [0, 1, 2] True 3 None 1"
MODULE = """
def asserts():
    assert False, "workers are optimized as well"
    return True
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
        check=False,
    )


@pytest.mark.parametrize("by", ["option", "variable"])
def test_cluster_under_optimization_runs_tasks_actors_and_groups(tmp_path: Path, by: str) -> None:
    (tmp_path / "optimized_module.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-OO"] if by == "option" else []
    variables = {} if by == "option" else {"PYTHONOPTIMIZE": "2"}
    done = run(*words, str(tmp_path / "program.py"), **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == EXPECTED


HELPS = f"""
from hoplite_mp._cli.main import main
for command in {COMMANDS}:
    try:
        code = main([*command.split(), "--help"])
    except SystemExit as error:
        code = error.code
    print("exit code", code)
"""


def test_command_line_under_optimization_prints_the_same_help() -> None:
    optimized, plain = run("-OO", "-c", HELPS), run("-c", HELPS)
    assert optimized.returncode == plain.returncode == 0, optimized.stderr
    assert plain.stdout.lower().count("usage: ") == len(COMMANDS)
    assert plain.stdout.count("exit code 0\n") == len(COMMANDS)
    assert optimized.stdout == plain.stdout


def test_every_public_name_under_optimization_is_importable() -> None:
    done = run(
        "-OO", "-c", "import hoplite_mp\nfor n in hoplite_mp.__all__: getattr(hoplite_mp, n)"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_asserts_of_the_package_have_no_effects() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Assert):
                continue
            for part in ast.walk(node.test):
                if isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield)):
                    found.append(f"{path.name}:{node.lineno}")
                if isinstance(part, ast.Call):
                    name = getattr(part.func, "id", getattr(part.func, "attr", ""))
                    if name not in PURE:
                        found.append(f"{path.name}:{node.lineno} calls {name}")
    assert not found
