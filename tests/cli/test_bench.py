"""`hoplite-mp bench`: what it measures is measured, shown and written."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hoplite_mp._cli import main
from hoplite_mp._cli.bench.host import _Fresh, show
from hoplite_mp._cli.bench.tasks import BenchRow, Effort, in_turns, percentile
from tests.lan import forked
from tests.support.clusters import PATIENCE_S, ROOT, TOKEN

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hoplite_mp", "bench", "--quick", *words]
    return forked.run(command, env={**os.environ, **environment}, cwd=ROOT, timeout=PATIENCE_S)


def test_turns() -> None:
    """A round for warming up that does not count, then each in its turn."""
    called: list[str] = []

    def contestant(name: str) -> float:
        called.append(name)
        return len(called)

    times = in_turns(Effort(0.0, 3), lambda: contestant("a"), lambda: contestant("b"))
    assert called == ["a", "b"] * 4
    assert times == [[3, 5, 7], [4, 6, 8]]


def test_percentile() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.99) == 5.0
    assert percentile(list(range(1, 201)), 0.99) == 198


def test_ratio_says_how_many_times_as_fast() -> None:
    assert BenchRow("a", 2.0, "s", "b", 6.0).ratio == 3.0
    assert BenchRow("a", 60.0, "1/s", "b", 20.0).ratio == 3.0
    assert BenchRow("a", 60.0, "B/s").ratio is None


def test_table() -> None:
    rows = [
        BenchRow("call", 57e-6, "s", "pool", 348e-6),
        BenchRow("many", 62_000, "1/s"),
        BenchRow("moved", 118.2e6, "B/s"),
        BenchRow("slow", 0.0145, "s", "memcpy", 1.25),
    ]
    head, *lines = show(rows).splitlines()
    assert head.split("  ")[-1] == "times as fast"
    assert lines[0].split() == ["call", "57.0", "µs", "348", "µs", "pool", "6.11"]
    assert lines[1].split() == ["many", "62", "000", "/s"]
    assert lines[2].split() == ["moved", "118", "MB/s"]
    assert lines[3].split() == ["slow", "14.5", "ms", "1.25", "s", "memcpy", "86.21"]
    assert "beside" not in show(rows[1:3])


def test_other_bytes_are_noticed() -> None:
    fresh = _Fresh()
    probe = fresh.next()[::4099].copy()
    fresh.check(probe)
    fresh.next()
    with pytest.raises(RuntimeError, match="bytes received differ"):
        fresh.check(probe)
    fresh.memcpy()
    assert np.array_equal(fresh.copy, fresh.array)


@pytest.mark.soak
def test_this_host(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    done = run("--workers", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["workers"] == 2
    assert found["numpy"] == np.__version__
    titles = [row["title"] for row in found["rows"]]
    assert len(titles) == len(set(titles)) == 9
    for row in found["rows"]:
        assert row["value"] > 0
        shown = [line for line in done.stdout.splitlines() if line.startswith(row["title"] + "  ")]
        assert len(shown) == 1
        assert shown[0].endswith(f"{row['ratio']:.2f}")
        assert row["reference"] in shown[0]
    seconds = {row["title"]: row["value"] for row in found["rows"]}
    # No copy is made, whatever else the host is doing.
    assert (
        seconds["get of 64 MiB in another process"]
        < seconds["put of 64 MiB"] / 5 + 2e-3
        < seconds["get of 64 MiB, copy=True"] + seconds["argument of 64 MiB by value"] + 2e-3
    )


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before anything is measured."""
    assert main.main(["bench", "--json", str(tmp_path / "nowhere" / "x.json")]) == 1
    captured = capsys.readouterr()
    assert "nowhere" in captured.err
    assert "measured" not in captured.err


def test_a_cluster(running: str) -> None:
    done = run(running, "--no-tls", HOPLITE_MP_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    titles = [line.split("  ")[0] for line in done.stdout.splitlines()[1:]]
    name = os.uname().nodename
    assert titles == [f"no-op on h0 ({name}), p50", f"64 MiB to h0 ({name})"]


def test_nobody_there() -> None:
    done = run("127.0.0.1:9", HOPLITE_MP_TOKEN=TOKEN, HOPLITE_MP_CONNECT_TIMEOUT_S="0.5")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]
