"""The certificate of a cluster, which is created in memory and never written to disk.

TLS needs a certificate, and a LAN should not need a certificate authority. Each cluster creates its
own certificate when it starts. Nodes receive it over their authenticated connection to the manager,
and use it as servers for their peers. Clients ignore its name, signature and dates. A client trusts
a server that proves the token over the certificate's hash (_protocol/handshake.py).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Certificate", "in_memory_file", "make_certificate"]

# The validity begins before the certificate's creation, because clocks differ, and ends after the
# longest run. hoplite_mp itself does not check these dates.
VALID_BEFORE = datetime.timedelta(days=1)
VALID_AFTER = datetime.timedelta(days=3650)
PEM_BYTES_MAX = 16 << 10  # usually about 1 KiB


class Certificate:
    """A certificate and its private key. `pem`: both in PEM format, which is a secret."""

    def __init__(self, pem: bytes) -> None:
        """pem: the `pem` of another Certificate. Raises ValueError if it does not contain a
        certificate and a key."""
        begin, end = pem.find(b"-----BEGIN CERTIFICATE-----"), pem.find(_END)
        if len(pem) > PEM_BYTES_MAX or not 0 <= begin < end or b"PRIVATE KEY-----" not in pem:
            raise ValueError(f"{len(pem)} bytes, not a certificate with its private key")
        self.pem = pem
        self._certificate = pem[begin : end + len(_END)].decode("ascii")

    @cached_property
    def sha256(self) -> bytes:
        """The hash of the certificate in binary form (DER). Clients compute the same hash."""
        import ssl

        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self._certificate)).digest()

    def __repr__(self) -> str:
        return f"<Certificate {self.sha256.hex()[:16]}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a certificate has a private key and cannot be pickled: send its pem")


_END = b"-----END CERTIFICATE-----"


def make_certificate() -> Certificate:
    """Creates a self-signed certificate with an EC P-256 key and a random serial number."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hoplite_mp")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_BEFORE)
        .not_valid_after(now + VALID_AFTER)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@contextlib.contextmanager
def in_memory_file(data: bytes) -> Iterator[str]:
    """A context manager that returns a path from which `data` can be read.

    The standard library loads certificates only from files. This file is anonymous memory (a
    memfd). It has no name in the file system, no other user can open it, and it disappears with its
    descriptor, even if this process is killed.
    """
    fd = os.memfd_create("hoplite_mp certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
