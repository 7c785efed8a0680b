"""Certificates: made in memory, carried as text, never on a disk."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from hoplite_mp._transport.certificates import Certificate, in_memory_file, make_certificate
from hoplite_mp._transport.tls import server_context
from tests.support.transport import certificate, other_certificate


def test_what_is_made() -> None:
    made = x509.load_pem_x509_certificate(certificate().pem)
    other = x509.load_pem_x509_certificate(other_certificate().pem)
    key = made.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert made.serial_number != other.serial_number
    assert certificate().sha256 == hashlib.sha256(made.public_bytes(Encoding.DER)).digest()
    assert certificate().sha256 != other_certificate().sha256


def test_it_travels_as_text_and_serves_elsewhere() -> None:
    again = Certificate(bytes(certificate().pem))
    assert again.sha256 == certificate().sha256
    server_context(again)


def test_its_key_is_not_shown_nor_pickled() -> None:
    assert "PRIVATE" not in repr(certificate())
    assert certificate().sha256.hex()[:16] in repr(certificate())
    with pytest.raises(TypeError, match="private key"):
        pickle.dumps(certificate())


@pytest.mark.parametrize("pem", [b"", b"x" * 100, b"-----BEGIN CERTIFICATE-----", b"x" * 20_000])
def test_what_is_no_certificate(pem: bytes) -> None:
    with pytest.raises(ValueError, match="not a certificate with its private key"):
        Certificate(pem)


def test_a_certificate_without_a_key() -> None:
    pem = certificate().pem
    with pytest.raises(ValueError, match="not a certificate"):
        Certificate(pem[: pem.index(b"-----BEGIN PRIVATE")])


def test_nothing_touches_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path leads to anonymous memory, and is gone with the block."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    descriptors = set(os.listdir("/proc/self/fd"))
    with in_memory_file(b"secret") as path:
        assert Path(path).read_bytes() == b"secret"
        assert os.readlink(path).startswith("/memfd:")
    server_context(make_certificate())
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert list(tmp_path.iterdir()) == []


ONE_HOST = """
import sys
import hoplite_mp

def loaded():
    rooms = [name for name in sys.modules if name.startswith("hoplite_mp._transport")]
    others = ("ssl", "cryptography", "hoplite_mp._protocol.handshake")
    return rooms + [name for name in others if name in sys.modules]

with hoplite_mp.Cluster(1) as c:
    found = loaded() + c.submit(loaded).result()
sys.exit(" ".join(found) or 0)
"""
PLAIN_DOOR = """
import sys
import hoplite_mp._transport.caller, hoplite_mp._transport.listener, hoplite_mp._transport.tokens
import hoplite_mp._transport.certificates, hoplite_mp._transport.memory
sys.exit(" ".join(m for m in ("ssl", "cryptography") if m in sys.modules) or 0)
"""


@pytest.mark.parametrize("code", [ONE_HOST, PLAIN_DOOR], ids=["one host", "plain"])
def test_who_needs_no_tls_does_not_load_it(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
