"""Checks of memory and of the disk to which objects are spilled.

If the store may grow beyond the free memory, puts wait, spill or fail later, which the user should
know before.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hoplite_mp._cli.doctor.findings import limits, ok, problem, warning
from hoplite_mp._client.memory import format_bytes
from hoplite_mp._client.store_size import store_size
from hoplite_mp._common.machine_limits import available_bytes, cgroup_limit, total_bytes
from hoplite_mp._node.io.spill_file import SpillFile, default_directory, is_tmpfs
from hoplite_mp.config import MIB
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._cli.doctor.findings import Finding
    from hoplite_mp.config import Config

__all__ = ["CHECKS"]

STORE_SMALL_BYTES = 64 * MIB  # of a smaller store, spans of small objects alone take a good part
WRITTEN = b"hoplite_mp doctor"


def _store_bytes(config: Config) -> int:
    try:
        return store_size(config.memory_bytes)[0]
    except ConfigError:  # the check of the address space reports it
        return config.memory_bytes or total_bytes() // 3


def _memory() -> Iterator[Finding]:
    """The store's limit, compared with the host's memory and with how much of that is free."""
    config = limits()
    store, total, free = _store_bytes(config), total_bytes(), available_bytes()
    reserve = min(config.memory_reserve_bytes, total // 8)
    source = "HOPLITE_MP_MEMORY_BYTES" if config.memory_bytes else "a third"
    if not config.memory_bytes and store < total // 3:
        source = "what ulimit allows"
    seen = f"{format_bytes(psutil.virtual_memory().total)} of RAM"
    if cgroup_limit() < psutil.virtual_memory().total:
        seen += f", {format_bytes(cgroup_limit())} for this control group"
    seen += f", {format_bytes(free)} free; the store may take {format_bytes(store)} ({source})"
    if store > total:
        yield problem("memory", seen, f"memory= must be less than {format_bytes(total)}")
    elif free <= reserve:
        advice = f"end other programs: {format_bytes(reserve)} are left to them (memory_reserve)"
        yield problem("memory", seen, advice)
    elif store > free - reserve:
        advice = (
            f"puts wait or spill from {format_bytes(max(0, free - reserve))} on; give memory= a "
            "smaller size, or end other programs"
        )
        yield warning("memory", seen, advice)
    elif store < STORE_SMALL_BYTES:
        yield warning("memory", seen, "that is little: give memory= a larger size")
    else:
        yield ok("memory", seen)


def _spilling() -> Iterator[Finding]:
    """Is the directory for spilled objects on a disk, with enough room, and can it be written
    to?"""
    config = limits()
    if config.spill_bytes_max == 0:
        yield ok("spilling", "it is switched off (HOPLITE_MP_SPILL_BYTES_MAX=0)")
        return
    folder = config.spill_dir or default_directory()
    if folder is None:
        seen = "neither TMPDIR nor /var/tmp nor the working directory is on a disk and writable"
        yield warning(
            "spilling", seen, "puts fail when the store is full; set HOPLITE_MP_SPILL_DIR"
        )
        return
    if not os.path.isdir(folder):
        yield problem("spilling", f"{folder} is no directory", "make it, or set spill_dir=")
        return
    try:
        _write_and_read(folder)
    except OSError as error:
        seen = f"{folder} does not take a file: {error.strerror or error}"
        yield problem("spilling", seen, "make it writable, or name another one with spill_dir=")
        return
    free = shutil.disk_usage(folder).free
    room = free if config.spill_bytes_max is None else min(free, config.spill_bytes_max)
    seen = f"{format_bytes(room)} in {Path(folder)}"
    if is_tmpfs(folder):
        seen += ", which is memory itself (tmpfs)"
        yield warning("spilling", seen, "spilling there gains nothing: name a directory on a disk")
    elif room < _store_bytes(config):
        advice = "less than one store full: make room, or name a larger disk with spill_dir="
        yield warning("spilling", seen, advice)
    else:
        yield ok("spilling", seen)


def _write_and_read(folder: str) -> None:
    """Writes and reads a file without a name, as the node does."""
    file = SpillFile(folder, None)
    try:
        place = file.write(memoryview(WRITTEN))
        assert place is not None
        back = bytearray(len(WRITTEN))
        file.read(place, memoryview(back))
        if back != WRITTEN:
            raise OSError("it gives back other bytes than were written")
    finally:
        file.close()


CHECKS = (_memory, _spilling)
