"""The signal that ends `up` and `join` finds them at any point of their wait."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hoplite_mp._common.signals import StopRequest

PATIENCE_S = 60.0
# The alarm strikes inside the wait, before it, and between its steps.
OFTEN = """
import random, signal
from hoplite_mp._common.signals import StopRequest
for _ in range(3000):
    asked = StopRequest()
    signal.signal(signal.SIGALRM, asked.signalled)
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
    while not asked.wait(2e-5):
        pass
"""


def test_a_signal_at_any_point_ends_the_wait() -> None:
    subprocess.run([sys.executable, "-c", OFTEN], check=True, timeout=PATIENCE_S)


def test_the_wait_ends_without_a_signal() -> None:
    asked = StopRequest()
    begun = time.monotonic()
    assert not asked.wait(0.01)
    assert time.monotonic() - begun >= 0.01
    asked.set()
    assert asked.is_set()
    assert asked.wait(PATIENCE_S)
    assert asked.wait(0)  # whoever asks again hears it again


def test_what_may_be_given_up_is_interrupted_once() -> None:
    asked = StopRequest()
    before = signal.signal(signal.SIGUSR1, asked.signalled)
    try:
        with pytest.raises(KeyboardInterrupt), asked.breaks():
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        with asked.breaks():  # asked for before: nothing is begun that would have to be given up
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked.is_set()
