"""The benchmarks over emulated hosts: their table, their ranks, peers that are not there.

What is measured is no matter here, and torch is not needed: interpreters and ranks are scripts.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.common import Row, beside
from benchmarks.lan.__main__ import KINDS as LAN_KINDS
from benchmarks.lan.floor import floor_rows
from benchmarks.lan.groups import rank_rows
from benchmarks.lan.rounds import check, measured, part
from benchmarks.peers.gloo import Gloo, why_not
from benchmarks.report import table
from tests.lan import Lan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


KINDS = ("allreduce", "apart", "broadcast", "send", "reduce", "gather", "allgather",
         "reduce_scatter")  # fmt: skip
NBYTES = 400
GRACE_S = 30.0


def interpreter(folder: Path, *lines: str) -> Path:
    """What stands where a peer's python is looked for."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def test_a_peer_stands_below_ours_with_its_ratio() -> None:
    rows = [
        Row("broadcast", 0.6, "s", "bound", 0.5, ratio=1.2, wanted=1.05),
        beside("broadcast", 0.6, "s", "Gloo", 1.5),
        Row("late", 0.7, "s"),
        beside("late", 0.7, "s", "Gloo", None),
    ]
    lines = [line.split() for line in table([row.as_dict() for row in rows]).splitlines()[2:]]
    assert lines == [
        ["broadcast", "600", "ms", "bound", "500", "ms", "1.20", "≤", "1.05", "NOT", "MET"],
        ["Gloo", "1.50", "s", "0.40"],
        ["late", "700", "ms"],
        ["Gloo", "cannot"],
    ]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (None, "there is no"),
        (["echo Traceback >&2", "echo \"No module named 'torch'\" >&2", "exit 1"],
         "cannot import torch (No module named 'torch')"),
        (["exit 3"], "cannot import torch (exit code 3)"),
    ],
)  # fmt: skip
def test_a_missing_environment_is_told_once_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str] | None, told: str
) -> None:
    python = tmp_path / "python" if lines is None else interpreter(tmp_path, *lines)
    gloo = Gloo(python)
    said = capsys.readouterr().err
    assert said.startswith("without Gloo: ")
    assert told in said
    assert str(python) in said
    assert "make peers" in said
    nowhere: Any = None  # without an environment no host is touched
    assert gloo.rows(nowhere, ["broadcast:1024:1"]) == gloo.cannot(["late"]) == {}
    assert capsys.readouterr().err == ""


def test_an_interpreter_that_hangs_or_is_none_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.gloo.PROBE_S_MAX", 0.2)
    assert "timed out" in str(why_not(interpreter(tmp_path, "exec sleep 60")))
    (tmp_path / "python").chmod(0o644)
    assert "does not run" in str(why_not(tmp_path / "python"))


def test_a_peer_that_is_there_says_what_it_cannot(tmp_path: Path) -> None:
    assert Gloo(interpreter(tmp_path, "exit 0")).cannot(["late", "tls"]) == {
        "late": None,
        "tls": None,
    }


class Alone:
    """Rank `rank` of two, which makes what a call has to return."""

    size = 2

    def __init__(self, rank: int, spoil: Callable[[Any], Any] = lambda got: got) -> None:
        self.rank = rank
        self.barriers = 0
        self._spoil = spoil

    def barrier(self) -> None:
        self.barriers += 1

    def prepared(self, kind: str, mine: Any) -> Callable[[], Any]:
        turn, more = divmod(self.barriers, 3)  # two before the call, one before its check
        assert not more
        parts = [part(kind, rank, NBYTES, turn) for rank in range(self.size)]
        assert np.array_equal(parts[self.rank], mine)
        total = parts[0] + parts[1]
        got = {
            "broadcast": parts[0],
            "send": parts[0] if self.rank == 1 else None,
            "reduce": total if self.rank == 0 else None,
            "gather": parts if self.rank == 0 else None,
            "allgather": parts,
            "reduce_scatter": np.array_split(total, 2)[self.rank],
        }.get(kind, total)
        return lambda: self._spoil(got)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_round_has_data_of_its_own_and_is_timed_but_the_first(kind: str, rank: int) -> None:
    row = f"{kind}:{NBYTES}:2"
    found = measured(Alone(rank), [row])
    assert len(found[row]) == 2
    assert all(-0.3 < seconds < 60 for seconds in found[row])
    assert (f"{row} cpu" in found) == (rank == 0)
    assert not np.array_equal(part(kind, rank, NBYTES, 0), part(kind, rank, NBYTES, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_element_is_seen(kind: str) -> None:
    def spoil(got: Any) -> Any:
        (got[1] if isinstance(got, list) else got)[-1] += 1
        return got

    receiver = 1 if kind == "send" else 0
    with pytest.raises(AssertionError, match=kind):
        measured(Alone(receiver, spoil), [f"{kind}:{NBYTES}:1"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_missing_or_too_much_is_seen(kind: str) -> None:
    ranks = Alone(1 if kind == "send" else 0)
    with pytest.raises(AssertionError, match="no result"):
        check(ranks, kind, NBYTES, 0, None)
    if kind in ("send", "reduce", "gather"):
        with pytest.raises(AssertionError, match="got a result"):
            check(Alone(1 - ranks.rank), kind, NBYTES, 0, part(kind, 0, NBYTES, 0))


@pytest.fixture(scope="module")
def lan4(lan_permitted: None) -> Iterator[Lan]:
    """Four hosts for the tests of this file, which leave nothing on them."""
    with Lan(4) as lan:
        yield lan


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_floor_moves_and_folds_the_right_bytes(lan_permitted: None) -> None:
    """It compares its results itself: a rank that finds a wrong element ends with an error."""
    rows = [f"{kind}:{nbytes}:2" for kind in LAN_KINDS for nbytes in (1024, 1_000_012)]
    with Lan(3) as lan:
        found = floor_rows(lan, rows)
    assert found.keys() == {key for row in rows for key in (row, f"{row} cpu")}


def script(text: str) -> list[str]:
    """A rank; `size`, `rank` and `rows` are its arguments."""
    head = "import json, sys, time\nsize, rank, rows = *map(int, sys.argv[1:3]), sys.argv[3:]\n"
    return [sys.executable, "-c", head + text]


def running(lan: Lan) -> list[str]:
    """What runs on the hosts beside their first processes, as /proc there has it."""
    found = []
    for host in lan:
        for status in Path(f"/proc/{host.pid}/root/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                said = status.read_text()
                if status.parent.name != "1" and said.rpartition(")")[2].split()[0] != "Z":
                    found.append(f"{host.name}: {said}")
    return found


def ended(lan: Lan) -> bool:
    """Nothing runs there any more; what is killed needs a moment."""
    end = time.monotonic() + GRACE_S
    while running(lan) and time.monotonic() < end:
        time.sleep(0.01)
    return not running(lan)


def test_the_slowest_rank_of_each_round_counts(lan4: Lan) -> None:
    # the slowest are rank 3 with 3, rank 3 with 4, rank 0 with 9; the median of these is 4
    text = "print(json.dumps({row: [rank, rank + 1, 9 - rank] for row in rows}))"
    assert rank_rows(lan4, script(text), {}, ["a:4:3", "b:4:3"]) == {"a:4:3": 4, "b:4:3": 4}


def test_a_rank_that_fails_ends_the_others(lan4: Lan) -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 ended with exit code 3"):
        rank_rows(lan4, script("sys.exit(3) if rank == 2 else time.sleep(60)"), {}, ["a:4:1"])
    assert time.monotonic() - begun < 30
    assert ended(lan4), running(lan4)


def test_ranks_that_take_too_long_are_ended(lan4: Lan) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="4 of 4 ranks took over 1 s"):
        rank_rows(lan4, script("time.sleep(60)"), {}, ["a:4:1"], row_s_max=1)
    assert time.monotonic() - begun < 30
    assert ended(lan4), running(lan4)


def test_a_peer_that_fails_is_told_and_the_table_goes_without(
    lan4: Lan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    works_then_fails = 'case "$1" in -c) exit 0;; *) exit 7;; esac'
    gloo = Gloo(interpreter(tmp_path, works_then_fails))
    assert gloo.rows(lan4, ["broadcast:1024:1"]) == {}
    assert "ended with exit code 7" in capsys.readouterr().err
    assert gloo.cannot(["late"]) == {"late": None}
    assert ended(lan4), running(lan4)
