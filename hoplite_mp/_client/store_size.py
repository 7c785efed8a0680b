"""How large a host's store is: the limit of its objects, and the length of its sparse file.

Every process of a host maps the whole file, so its length counts against `ulimit -v` of each, and
against `ulimit -f`, although it costs no memory. Where such a limit is set, the store takes at most
half of what the limit leaves; the rest is for the program.
"""

from __future__ import annotations

import os

from hoplite_mp import _shm
from hoplite_mp._client.memory import format_bytes
from hoplite_mp._common.machine_limits import address_space_left, file_size_limit, total_bytes
from hoplite_mp.config import MIB
from hoplite_mp.errors import ConfigError

__all__ = ["check_room_to_attach", "store_size"]

LENGTH_MIN, LENGTH_MAX = 64 << 30, 32 << 40  # address space, not memory
MEMORY_MAX = LENGTH_MAX // 2
FACTOR = 8  # so that fragmentation never prevents an allocation while there is memory
FACTOR_MIN = 2  # under an ulimit: ranges that are free, but apart, are then combined more often
DEFAULT_MIN = 64 * MIB  # no smaller store is made unless memory= asks for it
ROOM_SHARE = 2  # the store takes at most 1/ROOM_SHARE of what a limit leaves
ADDRESSES, FILES = "address space (ulimit -v)", "file length (ulimit -f)"


def store_size(memory: int | None) -> tuple[int, int]:
    """(limit of the store, length of its file), in bytes. memory: the limit that the user asks for;
    None: a third of what the host has, or less under an ulimit. ConfigError: no such store can be
    made here."""
    limit = memory or total_bytes() // 3
    if limit > MEMORY_MAX:
        raise ConfigError(f"memory={limit}: it must be at most {MEMORY_MAX} bytes (16 TiB)")
    length = min(max(LENGTH_MIN, FACTOR * limit), LENGTH_MAX)
    room, left, which = _room()
    if length <= room:
        return limit, length
    most = room // FACTOR_MIN
    if memory is None and most >= DEFAULT_MIN:
        return min(limit, most), room
    if memory is not None and memory <= most:
        return memory, room
    asked = f"memory={memory}" if memory else f"a store of {format_bytes(DEFAULT_MIN)}"
    wanted = memory or DEFAULT_MIN
    needed = ROOM_SHARE * FACTOR_MIN * wanted
    if which == ADDRESSES:
        needed += ROOM_SHARE * _shm.CONTROL_MEMORY_BYTES
    else:
        needed = max(needed, _shm.CONTROL_MEMORY_BYTES)
    smaller = f", or ask for at most memory={most}" if memory and most >= MIB else ""
    raise ConfigError(
        f"{asked} needs about {format_bytes(needed)} of {which}, and the limit leaves "
        f"{format_bytes(left)}: raise the limit{smaller}"
    )


def _room() -> tuple[int, int, str]:
    """(how long the store's file may be, what the tightest limit leaves, the limit's name)."""
    addresses, files = address_space_left(), file_size_limit()
    by_addresses = addresses // ROOM_SHARE - _shm.CONTROL_MEMORY_BYTES
    by_files = files // ROOM_SHARE if files >= _shm.CONTROL_MEMORY_BYTES else 0
    if by_addresses <= by_files:
        return max(0, by_addresses) & ~4095, addresses, ADDRESSES
    return by_files & ~4095, files, FILES


def check_room_to_attach(control_fd: int, store_fd: int) -> None:
    """ConfigError if a limit of this process is too small for the memory of a node that exists."""
    lengths = [os.fstat(fd).st_size for fd in (control_fd, store_fd)]
    for needed, left, which in (
        (sum(lengths), address_space_left(), ADDRESSES),
        (max(lengths), file_size_limit(), FILES),
    ):
        if needed > left:
            raise ConfigError(
                f"the store of this host's node needs {format_bytes(needed)} of {which}, and the "
                f"limit leaves {format_bytes(left)} here: raise the limit in this process, or "
                "start the node under the same limit"
            )
