"""Programs whose threads are first to send everything at the same instant: `first_pickled.py`."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PROGRAM = Path(__file__).with_name("first_pickled.py")
FRESH = 1
AT_A_TIME = 2
SEEDS = 1 << 30
SOAK_PROGRAMS, SOAK_FORKS = 2000, 20  # programs in all; those of one interpreter


def wrong_of(*numbers: int) -> list[str]:
    """Runs the program; returns what it says was wrong."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, numbers)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    lines = done.stdout.splitlines()
    ended = sum(line.startswith("end ") for line in lines)
    wrong = [f"seed {numbers[0]}: {line}" for line in lines if "WRONG" in line or "FAILED" in line]
    if done.returncode or ended != (numbers[1] if len(numbers) > 1 else 1):
        wrong.append(f"seed {numbers[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return wrong


def test_values_of_fresh_programs_whose_threads_send_first_at_once_are_right() -> None:
    first = random.randrange(SEEDS)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = [*itertools.chain.from_iterable(pool.map(wrong_of, range(first, first + FRESH)))]
    assert found == []


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)  # some seconds a program
def test_values_of_thousands_of_fresh_programs_are_right() -> None:
    first = random.randrange(SEEDS)
    seeds = range(first, first + SOAK_PROGRAMS, SOAK_FORKS)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = pool.map(lambda seed: wrong_of(seed, SOAK_FORKS), seeds)
        assert [*itertools.chain.from_iterable(found)] == []
