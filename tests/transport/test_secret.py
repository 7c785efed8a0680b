"""Secrets in memory: one mapping each, which core dumps leave out."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import re
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

import hoplite_mp
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.tokens import Token

if TYPE_CHECKING:
    from pathlib import Path

REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .*?\n(?:.*\n)*?VmFlags: (.*)$", re.MULTILINE)
REGION_BYTES_MAX = 1 << 30  # the store's address space is larger, and holds objects alone


def copies(pid: int, data: bytes) -> tuple[int, int]:
    """Copies of the bytes in a process: (in mappings that a core dump has, in others)."""
    dumped = left_out = 0
    with open(f"/proc/{pid}/smaps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for first, last, rights, flags in REGION.findall(maps.read()):
            begin, end = int(first, 16), int(last, 16)
            if "r" not in rights or end - begin > REGION_BYTES_MAX:
                continue
            try:
                memory.seek(begin)
                found = memory.read(end - begin).count(data)
            except (OSError, OverflowError):  # pages of the kernel
                continue
            if "dd" in flags.split():
                left_out += found
            else:
                dumped += found
    return dumped, left_out


def test_secret_mac_equals_hmac_of_its_bytes() -> None:
    key = secrets.token_bytes(32)
    assert Secret(key).mac(b"message") == hmac.digest(key, b"message", hashlib.sha256)
    assert Secret(key).reveal() == key


def test_secret_repr_and_pickle_show_nothing() -> None:
    assert repr(Secret(b"abcdefgh")) == "<Secret>"
    with pytest.raises(TypeError, match="secret"):
        pickle.dumps(Secret(b"abcdefgh"))


MAKES_A_SECRET = """
import os, secrets, sys
from hoplite_mp._protocol.secret import Secret

half = secrets.token_bytes(16)  # in halves, so that nothing here holds a copy of the whole
kept = Secret(half + half[::-1])
print(half.hex(), flush=True)
sys.stdin.read()
"""


def test_secret_stays_out_of_core_dumps() -> None:
    """A process of its own: a process that ran other tests maps gigabytes, all of them read."""
    command = [sys.executable, "-c", MAKES_A_SECRET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        half = bytes.fromhex(child.stdout.readline().decode())
        _dumped, left_out = copies(child.pid, half + half[::-1])
        child.communicate()
    assert left_out == 1
    assert child.returncode == 0


def test_cluster_processes_keep_the_key_only_outside_of_core_dumps(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(secrets.token_urlsafe(32))
    file.chmod(0o600)
    key = Token(file.read_text()).key.reveal()
    with hoplite_mp.Cluster(workers=1, listen="127.0.0.1:0", token=file) as cluster:
        cluster.submit(abs, -1).result(timeout=60)
        started = psutil.Process().children(recursive=True)
        found = {child.name(): copies(child.pid, key) for child in started}
    assert {"hoplite node", "hoplite manager"} <= found.keys()
    assert all(dumped == 0 for dumped, _ in found.values()), found
    assert found["hoplite node"][1] == found["hoplite manager"][1] == 1, found
