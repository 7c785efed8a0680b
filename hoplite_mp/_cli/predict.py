"""The command `hoplite-mp predict`: options, output and exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING

from hoplite_mp._cli.simulate import bandwidth, duration, host_counts
from hoplite_mp._cli.table import table
from hoplite_mp._common.machine_limits import (
    available_bytes,
    format_bytes,
    format_seconds,
    three_digits,
)
from hoplite_mp._simulation.prediction.play import (
    HOSTS_MIN,
    Machines,
    NotPlayed,
    memory_bytes,
    play,
)
from hoplite_mp._simulation.prediction.recording import NotRecorded, read
from hoplite_mp._simulation.prediction.transfer_cpu import measured_byte_s
from hoplite_mp._version import __version__
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from hoplite_mp._simulation.prediction.play import Prediction
    from hoplite_mp._simulation.prediction.recording import RecordedTraining

__all__ = ["payload_rate", "predict", "show"]

# Limit for --hosts. Simulated hosts run in one process, with real shared memory.
HOSTS_MAX = 64
LATENCY_MAX_S = 0.5  # above this, simulated hosts would declare each other dead
# The share of TCP payload in a full Ethernet frame, with its preamble and the gap between frames.
PAYLOAD_SHARE = 1448 / 1538
INTERRUPTED = 130  # the exit code that shells use


def predict(arguments: argparse.Namespace) -> int:
    """Replays the trace, and prints the predictions. Returns the exit code."""
    try:
        return _predict(arguments)
    except KeyboardInterrupt:
        print("hoplite-mp predict: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, NotRecorded, NotPlayed, OSError) as error:
        what = f"{arguments.trace}: {error}" if isinstance(error, NotRecorded) else str(error)
        print(f"hoplite-mp predict: {what}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, NotRecorded)) else 1


def payload_rate(option: str, text: str) -> float:
    """Parses an option with a nominal bandwidth, and returns the payload bytes per second."""
    return bandwidth(option, text) * PAYLOAD_SHARE


def _predict(arguments: argparse.Namespace) -> int:
    counts = host_counts("hosts", arguments.hosts, HOSTS_MIN, HOSTS_MAX)
    rate = payload_rate("bandwidth", arguments.bandwidth)
    latency_s = duration("latency", arguments.latency)
    if latency_s > LATENCY_MAX_S:
        raise ConfigError(f"--latency={arguments.latency!r} is not allowed: use at most 500ms")
    recording = read(arguments.trace, arguments.server or "", arguments.calls_per_step or 0)
    for hosts in counts:
        _check_memory(recording, hosts)
    if arguments.json is not None:
        arguments.json.touch()  # fails before the simulation if the file cannot be written
    byte_s = measured_byte_s() if arguments.cpu_per_gb is None else arguments.cpu_per_gb / 2e9
    predictions: list[Prediction] = []
    with _quiet():
        for hosts in counts:
            machines = Machines(
                hosts, rate, latency_s, arguments.cores_per_host, arguments.cores, byte_s
            )
            predictions.append(play(recording, machines, arguments.steps, arguments.seed))
    print(
        f"{len(recording.steps)} recorded steps of {_what(recording)}, "
        f"{format_seconds(recording.step_s)} each with one worker; links of "
        f"{arguments.bandwidth}/s, {three_digits(2e9 * byte_s)} s of CPU per GB transferred"
    )
    print(show(predictions))
    if arguments.json is not None:
        content = {
            "hoplite_mp": __version__,
            "recorded_steps": len(recording.steps),
            "recorded_step_s": recording.step_s,
            "mode": _mode(recording),
            "bandwidth": rate,
            "latency_s": latency_s,
            "cores_per_host": arguments.cores_per_host,
            "cores": arguments.cores,
            "cpu_per_gb": 2e9 * byte_s,
            "rows": [dataclasses.asdict(one) for one in predictions],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context manager inside which no warnings are logged, because the nodes are simulated."""
    logger = logging.getLogger("hoplite_mp")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_memory(recording: RecordedTraining, hosts: int) -> None:
    """Raises ConfigError if memory is too small for the simulated hosts, which hold real
    arrays."""
    needed, free = memory_bytes(recording, hosts), available_bytes()
    if needed > free:
        raise ConfigError(
            f"--hosts: simulating {hosts} hosts may take {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are available"
        )


def _mode(recording: RecordedTraining) -> str:
    return "asynchronous" if recording.is_asynchronous else "synchronous"


def _what(recording: RecordedTraining) -> str:
    if recording.is_asynchronous:
        return f"asynchronous training with the actor {recording.name}"
    return "synchronous training"


def show(predictions: Sequence[Prediction]) -> str:
    """The predictions as a table."""
    cells: list[tuple[str, ...]] = [("hosts", "workers", "steps/s", "p10", "p90", "bottleneck")]
    for one in predictions:
        others = sorted(one.busy.items(), key=lambda item: -item[1])
        cells.append(
            (
                str(one.hosts),
                str(one.workers),
                three_digits(one.steps_per_s),
                three_digits(one.p10),
                three_digits(one.p90),
                ", ".join(f"{name} {100 * share:.0f} %" for name, share in others),
            )
        )
    return "\n".join(table(cells, right=range(5)))
