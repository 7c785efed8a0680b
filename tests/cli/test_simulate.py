"""`hoplite-mp simulate`: what it plays is shown, judged and written; what it cannot is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli import main
from tests.lan import forked
from tests.support.clusters import PATIENCE_S, ROOT

if TYPE_CHECKING:
    from pathlib import Path


def simulate(*words: str) -> int:
    return main.main(["simulate", *words])


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    words = ["--nodes", "4,8", "--operations", "allreduce,gather", "--bytes", "8MiB"]
    assert simulate(*words, "--rate", "10Gbit", "--latency", "50us", "--json", str(file)) == 0
    shown = capsys.readouterr()
    first, head, _, *rows = shown.out.splitlines()
    assert first == "8MiB a source, 10Gbit/s each way, 50us between any two hosts"
    assert head.split()[:4] == ["operation", "nodes", "time", "bound"]
    assert [row.split()[:2] for row in rows] == [
        ["allreduce", "4"], ["allreduce", "8"], ["gather", "4"], ["gather", "8"]
    ]  # fmt: skip
    assert "stripes over 8 owners" in rows[1]
    assert len(shown.err.splitlines()) == 4
    written = json.loads(file.read_text())
    assert written["rate"] == 1.25e9
    for row in written["rows"]:
        assert row["bound_s"] < row["seconds"] < 1.5 * row["bound_s"]
        assert row["ratio"] == row["seconds"] / row["bound_s"]
        assert row["messages_a_node"] > 1
    bounds = {(row["operation"], row["nodes"]): row["bound_s"] for row in written["rows"]}
    one = (8 << 20) / 1.25e9
    assert bounds["allreduce", 8] == pytest.approx(2 * 7 / 8 * one)
    assert bounds["gather", 4] == pytest.approx(3 * one)


def test_topologies_and_plans_make_a_table_and_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    words = ["--topology", "torus:8x8,star:16", "--plan", "ring,two-way-ring,multitree"]
    assert simulate(*words, "--nbytes", "64MiB", "--latency", "0s", "--json", str(file)) == 0
    first, head, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "allreduce of 64MiB, links of 1Gbit/s each way, 0s for each step"
    assert head.split()[:6] == ["topology", "plan", "trees", "blocks", "steps", "time"]
    assert [row.split() for row in rows] == [
        ["torus:8x8", "ring", "64", "1", "126", "1.06", "s", "1.00", "0.50"],
        ["torus:8x8", "two-way-ring", "128", "1", "126", "528", "ms", "2.00", "1.00"],
        ["torus:8x8", "multitree", "64", "1", "34", "285", "ms", "3.71", "1.85"],
        ["star:16", "ring", "16", "1", "30", "1.01", "s", "1.00", "1.00"],
        ["star:16", "two-way-ring", "32", "1", "30", "1.01", "s", "1.00", "1.00"],
        ["star:16", "multitree", "16", "1", "30", "1.01", "s", "1.00", "1.00"],
    ]
    written = json.loads(file.read_text())
    assert (written["nbytes"], written["rate"], written["latency_s"]) == (64 << 20, 125e6, 0)
    ring, _, tree = written["rows"][:3]
    assert tree["over_ring"] == ring["seconds"] / tree["seconds"] == pytest.approx(63 / 17)


def test_topology_without_plans_shows_all_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--topology", "mesh:2x4") == 0
    shown = [row.split()[1] for row in capsys.readouterr().out.splitlines()[3:]]
    assert shown == ["ring", "two-way-ring", "halving", "twotree", "multitree", "packed"]


def test_time_is_virtual(capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes on a slow link are over as soon as moments on a fast one."""
    assert simulate("--operations", "broadcast", "--rate", "1Mbit", "--bytes", "64MiB") == 0
    assert " 537 s " in capsys.readouterr().out


def played(*words: str, before: str = "") -> tuple[int, str, str]:
    """Runs with faults, in a process of their own. before: what is done there first."""
    code = (
        f"{before}\nimport sys; from hoplite_mp._cli import main; "
        f"sys.exit(main.main({list(words)!r}))"
    )
    ended = forked.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=2 * PATIENCE_S,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_random_faults() -> None:
    code, out, _ = played("simulate", "--faults", "random", "--seed", "7", "--seeds", "4")
    assert code == 0
    assert "4 runs of" in out
    assert " 0 failed" in out
    assert "explained by a fault" in out


def test_one_seed_has_one_log() -> None:
    words = ["simulate", "--faults", "random", "--seed", "7", "--nodes", "5"]
    (code, out, _), (again, other, _) = played(*words), played(*words)
    assert code == again == 0
    assert "digest of the log: " in out
    assert out == other


def test_what_does_not_hold_is_shown() -> None:
    mistake = (
        "from hoplite_mp._node.objects.exports import Exports\n"
        "Exports.release = lambda self, peer, message: True"
    )
    code, out, told = played("simulate", "--faults", "random", "--seeds", "5", before=mistake)
    assert code == 1
    assert "FAILED  --seed" in out
    assert "still has" in out
    assert "has ended" in told  # the story of the first one


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes", "1"], "whole numbers from 2 to 20000"),
        (["--nodes", "8,x"], "whole numbers from 2"),
        (["--nodes", "33", "--faults", "random"], "whole numbers from 2 to 32"),
        (["--nodes", "4,8", "--faults", "random"], "allows only one number in --nodes"),
        (["--operations", "scan"], "'scan' is not one of broadcast"),
        (["--bytes", "some"], "--bytes: invalid size 'some'"),
        (["--bytes", "3"], "at least 64 bytes"),
        (["--rate", "fast"], "bits per second"),
        (["--rate", "0bit"], "bits per second"),
        (["--rate", "1.2.3Gbit"], "bits per second"),
        (["--latency=-1s"], "up to a minute"),
        (["--latency", "soon"], "up to a minute"),
        (["--block", "x"], "--block: invalid size 'x'"),
        (["--seeds", "5"], "--seeds requires --faults random"),
        (["--plan", "ring"], "--plan requires --topology"),
        (["--topology", "ring:8"], "--topology: 'ring:8' is none of torus:8x8"),
        (["--topology", "fattree:8"], "a square number"),
        (["--topology", "star:6"], "--plan: halving needs a power of two of hosts, and star:6 has"),
        (["--topology", "star:4", "--plan", "chain"], "'chain' is not one of ring, two-way-ring"),
        (["--topology", "star:4", "--nodes", "4"], "--nodes is not allowed with --topology"),
        (["--topology", "star:4", "--faults", "random"], "not allowed with --topology"),
        (["--bytes", "1MiB", "--faults", "random"], "--bytes is not allowed with --faults random"),
    ],
)
def test_bad_values(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*(f"{word}" for word in words)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert why in shown.err


@pytest.mark.parametrize("words", [["--nodes", "4"], ["--topology", "star:4"]])
def test_a_file_that_cannot_be_written(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*words, "--json", "/nowhere/table.json") == 1
    assert "/nowhere/table.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--seed", "-1"], ["--seeds", "0"], ["--faults", "some"]])
def test_what_the_parser_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate(*words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_as_a_command() -> None:
    """It needs no host, no cluster, and none of what a node imports."""
    code = (
        "import sys; from hoplite_mp._cli import main; code = main.main(['simulate', "
        "'--nodes', '3', '--operations', 'reduce', '--bytes', '1MiB']); "
        "assert 'hoplite_mp._node.runtime.main' not in sys.modules; sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert "reduce" in ended.stdout
