"""Limits of address space and of the length of files (ulimit -v, -f): a host within them."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._node.io.spill_file import SpillFile
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
WORK = """
import resource, sys
import numpy as np
import hoplite_mp
with hoplite_mp.Cluster(2, **OPTIONS) as c:
    total = c.nodes[0].memory_total
    assert total <= MOST, total
    parts = [c.submit(np.ones, 1 << 20) for _ in range(3)]
    assert c.get(c.reduce(parts))[5] == 3.0
    rng, kept = np.random.default_rng(1), {}
    for i in range(400):  # pieces of many sizes, which leave gaps
        kept[i] = c.put(np.full(int(rng.integers(1, 1 << 21)), i % 256, np.uint8))
        while sum(len(c.get(one)) for one in kept.values()) > total * 6 // 10:
            del kept[list(kept)[int(rng.integers(len(kept)))]]
    assert all(c.get(one)[-1] == i % 256 for i, one in kept.items())
    print(total)
"""
REFUSED = """
import hoplite_mp
try:
    hoplite_mp.Cluster(1, **OPTIONS)
except hoplite_mp.ConfigError as error:
    print(error)
"""
LIMITS = {"-v": resource.RLIMIT_AS, "-f": resource.RLIMIT_FSIZE}


def run(program: str, which: str, limit: int, options: str = "{}") -> str:
    """The program's output, under that limit."""
    text = program.replace("OPTIONS", options).replace("MOST", str(limit // 2))
    text = f"import resource\nresource.setrlimit({LIMITS[which]}, ({limit}, {limit}))\n{text}"
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(("which", "limit"), [("-v", 8 * GIB), ("-f", 32 * GIB)])
def test_cluster_under_a_limit_uses_at_most_half_of_it(which: str, limit: int) -> None:
    assert int(run(WORK, which, limit, '{"memory": "128MiB"}')) == 128 << 20
    assert int(run(WORK, which, limit)) >= 64 << 20


@pytest.mark.parametrize("which", ["-v", "-f"])
def test_memory_beyond_a_limit_is_one_error_that_names_it(which: str) -> None:
    words = run(REFUSED, which, 16 * GIB, '{"memory": "15GiB"}')
    assert f"(ulimit {which})" in words
    assert f"memory={15 * GIB} needs" in words
    most = int(words.rpartition("memory=")[2])
    assert int(run(WORK, which, 16 * GIB, f"{{'memory': {most - (64 << 20)}}}"))


@pytest.mark.parametrize("which", ["-v", "-f"])
def test_limit_below_the_least_is_one_error_that_names_it(which: str) -> None:
    words = run(REFUSED, which, 2 * GIB)
    assert f"(ulimit {which}), and the limit leaves" in words
    assert "raise the limit" in words


@pytest.mark.parametrize("which", ["-v", "-f"])
def test_attaching_to_a_larger_store_is_one_error_that_names_the_limit(
    tmp_path: Path, which: str
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    (tmp_path / "token").chmod(0o600)
    attach = f"""
import hoplite_mp, resource, sys
resource.setrlimit({LIMITS[which]}, ({20 * GIB}, {20 * GIB}))
try:
    hoplite_mp.Cluster(address=sys.argv[1], token=hoplite_mp_path)
except hoplite_mp.ConfigError as error:
    print(error)
""".replace("hoplite_mp_path", f"__import__('pathlib').Path({str(tmp_path / 'token')!r})")
    program = f"""
import hoplite_mp, pathlib, subprocess, sys
from hoplite_mp._api.cluster import Cluster
class Staying(Cluster):
    _stays = True
with Staying(1, listen="127.0.0.1:0", token=pathlib.Path({str(tmp_path / "token")!r})) as c:
    command = [sys.executable, "-c", {attach!r}, c.address]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout + done.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.stdout.startswith("the store of this host's node needs"), done
    assert f"(ulimit {which})" in done.stdout
    assert len(done.stdout.strip().splitlines()) == 1


def test_spill_file_under_a_limit_is_no_longer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 16, 1 << 16))
    file = SpillFile(str(tmp_path), None)
    try:
        assert file.write(memoryview(bytes(1 << 15))) == 0
        assert file.write(memoryview(bytes(1 << 16))) is None
    finally:
        file.close()
