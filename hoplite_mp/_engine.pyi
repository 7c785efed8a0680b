"""Streams of bulk bytes between hosts, reduced on the way, without the GIL.

`cext/engine_state.h` says what an engine is made of, `cext/engine_frames.h` what travels. Every
method may be called from any thread; in a forked child, and after stop(), all raise RuntimeError.
Unknown numbers of cells and links are KeyErrors.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias, final

from numpy.typing import NDArray
from typing_extensions import Buffer

# Anything that gives its bytes; until Python 3.12 an array does not declare that it does.
_Bytes: TypeAlias = Buffer | NDArray[Any]
_Key: TypeAlias = tuple[int, int, int, int]

FILLED: Final[int]
PULL_FAILED: Final[int]
FOLD_FAILED: Final[int]
CLOSED: Final[int]
LINK_LOST: Final[int]
HEADER_BYTES: Final[int]
BLOCK_BYTES_LEAST: Final[int]
BLOCK_BYTES_MOST: Final[int]
PULLS_MAX: Final[int]

def accumulator_dtype(op: str, dtype: str) -> str: ...
def crc32c(data: _Bytes, crc: int = 0, by_table: bool = False) -> int: ...

@final
class Engine:
    def __init__(
        self,
        incarnation: int,
        block_bytes_max: int = 262144,
        waiting_requests_max: int = 16384,
        threaded: bool = True,
    ) -> None: ...
    def step(self) -> bool: ...
    def fileno(self) -> int: ...
    def connect(
        self, fd: int, peer: int, checksum: bool = True, peer_incarnation: int = 0
    ) -> int: ...
    def drive(self, peer: int, peer_incarnation: int = 0) -> Driver: ...
    def disconnect(self, link: int) -> None: ...
    def counters(self, link: int) -> tuple[int, int, int, int]: ...
    def cell(
        self,
        key: _Key | None,
        buffer: _Bytes,
        offset: int = 0,
        nbytes: int | None = None,
        filled: bool | int = False,
    ) -> int: ...
    def watermark(self, cell: int) -> int: ...
    def advance(self, cell: int, watermark: int) -> None: ...
    def pull(self, cell: int, link: int, key: _Key | None = None) -> None: ...
    def fold(
        self,
        cell: int,
        sources: Sequence[int],
        op: str,
        dtype: str,
        divisor: int = 0,
        accumulated: Collection[int] = (),
        final: bool = True,
    ) -> None: ...
    def close(self, cell: int) -> None: ...
    def events(self) -> list[tuple[Any, ...]]: ...
    def stop(self) -> None: ...

@final
class Driver:
    @property
    def link(self) -> int: ...
    def next_frame(self, timeout: float) -> list[bytes | memoryview] | None: ...
    def sent(self) -> None: ...
    def receive_into(self, timeout: float) -> memoryview | None: ...
    def received(self, nbytes: int) -> None: ...
