"""The spill file: one unnamed file on a real disk, with its own arena.

It holds values that do not fit in memory. The file has no name (O_TMPFILE, or unlinked after its
creation), so it disappears when the node stops.
"""

from __future__ import annotations

import ctypes
import os
import tempfile

from hoplite_mp._common.arena import Arena
from hoplite_mp._common.machine_limits import file_size_limit

__all__ = ["SpillFile", "default_directory"]

FILE_BYTES_MAX = 1 << 44
TMPFS_MAGIC = 0x01021994
PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)


def is_tmpfs(path: str) -> bool:
    """Whether the directory's files are kept in memory, so that spilling to it would free
    nothing."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return True
    return int.from_bytes(buffer.raw[:4], "little") == TMPFS_MAGIC


def default_directory() -> str | None:
    """The first of TMPDIR, /var/tmp and the working directory that is on a disk and writable, or
    None."""
    for path in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
        if os.access(path, os.W_OK | os.X_OK) and not is_tmpfs(path):
            return path
    return None


class SpillFile:
    """The spill file, which is created at the first write. Methods raise OSError if the disk fails
    or is full."""

    def __init__(self, directory: str | None, bytes_max: int | None) -> None:
        self.directory = directory
        longest = min(FILE_BYTES_MAX, file_size_limit())
        self.arena = Arena(longest if bytes_max is None else min(bytes_max, longest), start=0)
        self._fd = -1

    @property
    def used(self) -> int:
        return self.arena.used

    def _open(self) -> int:
        if self._fd < 0:
            directory = self.directory or default_directory()
            if directory is None:
                raise OSError("no directory on a disk to spill to; set spill_dir=")
            try:
                self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError:
                self._fd, path = tempfile.mkstemp(dir=directory)
                os.unlink(path)
        return self._fd

    def write(self, data: memoryview) -> int | None:
        """Writes the data. Returns its position, or None if spill_bytes_max is reached."""
        fd = self._open()
        start = self.arena.allocate(len(data))
        if start is None:
            return None
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(fd, data[done : done + (1 << 30)], start + done)
        except OSError:
            self.free(start)
            raise
        return start

    def read(self, position: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = os.preadv(self._fd, [into[done : done + (1 << 30)]], position + done)
            if got <= 0:
                raise OSError("the spill file is shorter than the data written to it")
            done += got

    def free(self, position: int) -> None:
        """Frees the range, and punches a hole to return its disk blocks immediately."""
        size = self.arena.size_of(position)
        self.arena.free(position, warm=False)
        _libc.fallocate(self._fd, PUNCH_HOLE, ctypes.c_int64(position), ctypes.c_int64(size))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
