"""Secrets that core dumps do not contain, because their bytes are in separate memory mappings.

Each mapping is private and excluded from core dumps (`MADV_DONTDUMP`); forked children inherit it.
SECURITY.md lists other copies of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import mmap

__all__ = ["Secret", "decode_secret", "encode_secret"]


class Secret:
    """Bytes that `repr`, pickles and core dumps do not show."""

    __slots__ = ("_memory",)

    _memory: mmap.mmap

    def __init__(self, data: bytes) -> None:
        """`data`: at least one byte."""
        import mmap  # not needed on one host

        self._memory = mmap.mmap(-1, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTDUMP)
        self._memory[:] = data

    def mac(self, message: bytes) -> bytes:
        """HMAC-SHA256 of the message under this secret."""
        # Imported here because these modules load OpenSSL, which is not needed on one host.
        import hashlib
        import hmac

        return hmac.digest(self._memory, message, hashlib.sha256)

    def reveal(self) -> bytes:
        """A copy of the bytes in ordinary memory, for messages to processes on this host."""
        return self._memory[:]

    def __eq__(self, other: object) -> bool:
        """Compares the bytes in constant time."""
        import hmac

        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._memory[:], other._memory[:])

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled")


def encode_secret(value: Any) -> bytes:
    """Encodes a Secret, as msgspec's `enc_hook`."""
    if isinstance(value, Secret):
        return value.reveal()
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode_secret(kind: type, value: Any) -> Any:
    """Decodes a Secret, as msgspec's `dec_hook`."""
    if kind is Secret and isinstance(value, bytes):
        return Secret(value)
    raise TypeError(f"cannot decode {type(value).__name__} as {kind.__name__}")
