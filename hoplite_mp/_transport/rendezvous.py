"""Lets drivers find the node on their host, by a UNIX socket in a directory.

    $XDG_RUNTIME_DIR/hoplite_mp/<cluster id>          or, if that is not possible,
    $TMPDIR/hoplite_mp-<user id>/<cluster id>         (TMPDIR: /tmp if it is not set)

The socket's name is the cluster's random id, so the names of several clusters do not collide. If
the socket accepts a connection, the node is on the driver's host, regardless of host names,
addresses and boot ids. The directory must belong to the user and be inaccessible to others (0700);
otherwise it is not used. All operations on the name use a descriptor of the checked directory.
Therefore the directory cannot be replaced after the check, and long paths fit into a socket
address.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Rendezvous", "Sole", "anybody", "folders", "peer_of", "reach"]

FOLDER = "hoplite_mp"
BACKLOG = 64  # simultaneous connections by drivers; further drivers block in connect()
# Maximum number of attempts to use a directory, which other processes may remove at any time.
AGAIN_MAX = 100
PID_BYTES_MAX = 20
NAME = re.compile(r"[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEVAL = struct.Struct("ll")
# struct flock, see fcntl(2): type, whence, start, length (0: to the end), pid.
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_log = logging.getLogger("hoplite_mp")


def folders() -> list[str]:
    """This user's directories, best first. They need not exist."""
    found = []
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):  # according to the XDG specification, other values are ignored
        found.append(os.path.join(runtime, FOLDER))
    temporary = os.environ.get("TMPDIR", "")
    base = temporary if os.path.isabs(temporary) else "/tmp"
    return [*found, os.path.join(base, f"{FOLDER}-{os.geteuid()}")]


def anybody() -> bool:
    """Whether there is a socket for any cluster on this host. Its node may be dead."""
    return any(_names(place) for place in _places())


def reach(cluster: bytes, patience_s: float) -> socket.socket | None:
    """Returns a blocking connection to this host's node in that cluster, or None if there is no
    such node. patience_s: timeout for the connection."""
    for place in _places():
        sock = _connect(place, cluster.hex(), patience_s)
        if sock is not None:
            return sock
    return None


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Returns (process id, user id) of the other end. The process id is 0 if that process is in
    another PID namespace."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Rendezvous:
    """A node's listening socket, and its name in the directory."""

    def __init__(self, folder: str, place: int, name: str, sock: socket.socket) -> None:
        self.socket = sock
        self._folder = folder
        self._place = place
        self._name = name
        self._mark = self._inode()

    @classmethod
    def open(cls, cluster: bytes, level: int = logging.WARNING) -> Rendezvous | None:
        """Creates the socket under the cluster's name. Returns None if a running node has the name,
        or if another process is changing the directory, so that the name may become free. Raises
        OSError if no directory can be used. level: for log messages about unsuitable directories.
        """
        why = OSError(errno.ENOENT, "no directory is suitable")
        for folder in folders():
            for _ in range(AGAIN_MAX):
                try:
                    place = _open(folder, level, make=True)
                    if place is None:
                        break
                    return cls._take(folder, place, cluster.hex())
                except FileNotFoundError as error:  # another process has just removed the directory
                    why = error
                except OSError as error:
                    why = error
                    break
        raise why

    @classmethod
    def _take(cls, folder: str, place: int, name: str) -> Rendezvous | None:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, place)
            # One process at a time. Otherwise, if two processes find a dead node's name, one of
            # them could remove the other's new name.
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            stack.callback(fcntl.flock, place, fcntl.LOCK_UN)
            _clean(place)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            stack.callback(sock.close)
            try:
                sock.bind(_path(place, name))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                raise
            sock.listen(BACKLOG)
            stack.pop_all()
            fcntl.flock(place, fcntl.LOCK_UN)
        return cls(folder, place, name, sock)

    def _inode(self) -> int | None:
        try:
            return os.stat(self._name, dir_fd=self._place, follow_symlinks=False).st_ino
        except OSError:  # the name has been removed
            return None

    def close(self) -> None:
        """Removes the name, and then closes the socket. In the reverse order, the name could by
        then belong to another node."""
        with contextlib.suppress(OSError):
            if self._mark is not None and self._inode() == self._mark:
                os.unlink(self._name, dir_fd=self._place)
            os.rmdir(self._folder)  # fails unless it is empty
        self.socket.close()
        os.close(self._place)


class Sole:
    """A lock for a role that only one of this user's processes on this host may have. It is a
    locked file in the directory, which contains the process's pid. The kernel releases the lock
    when the process exits."""

    def __init__(self, folder: str, place: int, name: str, fd: int) -> None:
        self._folder = folder
        self._place = place
        self._name = name
        self._fd = fd

    @classmethod
    def take(cls, name: str) -> Sole | None:
        """Acquires the lock. Returns None if another process has it. Raises OSError if no directory
        can be used."""
        why = OSError(errno.ENOENT, "no directory is suitable")
        # The last process that uses a directory removes it. The same directory is then tried again,
        # because a lock in the next directory would be a different lock.
        for folder in [folder for folder in folders() for _ in range(AGAIN_MAX)]:
            try:
                place = _open(folder, logging.DEBUG, make=True)
                if place is not None:
                    return cls._lock(folder, place, f"{name}.lock")
            except OSError as error:
                why = error
        raise why

    @classmethod
    def _lock(cls, folder: str, place: int, name: str) -> Sole | None:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, place)
            while True:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(name, flags, 0o600, dir_fd=place)
                stack.callback(os.close, fd)
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
                except BlockingIOError:
                    return None
                try:
                    named = os.stat(name, dir_fd=place, follow_symlinks=False).st_ino
                except FileNotFoundError:
                    continue
                # If the inodes differ, the previous holder has just removed the locked file.
                if named == os.fstat(fd).st_ino:
                    os.truncate(fd, 0)
                    os.pwrite(fd, str(os.getpid()).encode(), 0)
                    stack.pop_all()
                    return cls(folder, place, name, fd)

    @staticmethod
    def holder(name: str) -> int | None:
        """The pid of the process that holds the lock, or 0 if the pid has not been written yet.
        None if the lock is free."""
        for place in _places():
            try:
                fd = os.open(
                    f"{name}.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place
                )
            except OSError:
                continue
            try:
                # F_OFD_GETLK tests the lock without acquiring it, so that attempts by other
                # processes to acquire it do not fail.
                found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)
                if _FLOCK.unpack(found)[0] != fcntl.F_UNLCK:
                    return int(os.pread(fd, PID_BYTES_MAX, 0) or b"0")
            finally:
                os.close(fd)
        return None

    def close(self) -> None:
        """Releases the lock."""
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._place)
            os.rmdir(self._folder)  # fails unless it is empty
        os.close(self._fd)
        os.close(self._place)


def _places() -> Iterator[int]:
    """Yields a descriptor of each existing directory, and closes it before the next one."""
    for folder in folders():
        try:
            place = _open(folder, logging.DEBUG)
        except OSError:
            continue
        if place is not None:
            try:
                yield place
            finally:
                os.close(place)


def _open(folder: str, level: int, make: bool = False) -> int | None:
    """Returns a descriptor of the directory, or None if it does not belong to the user or is
    accessible to others. Raises OSError if it does not exist and cannot be created."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            _log.log(level, "%s is not used for sockets: it is not a directory", folder)
            return None
        raise
    status = os.fstat(place)
    why = ""
    if status.st_uid != os.geteuid():
        why = f"it belongs to user {status.st_uid}"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        why = f"it is open to others (mode {stat.S_IMODE(status.st_mode):04o})"
    if not why:
        return place
    os.close(place)
    _log.log(level, "%s is not used for sockets: %s", folder, why)
    return None


def _path(place: int, name: str) -> str:
    return f"/proc/self/fd/{place}/{name}"


def _names(place: int) -> list[str]:
    return [name for name in os.listdir(place) if NAME.fullmatch(name)]


def _connect(place: int, name: str, patience_s: float) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    whole = int(patience_s)
    limit = _TIMEVAL.pack(whole, int((patience_s - whole) * 1e6))
    try:  # connect() blocks while the backlog is full, as a write would
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(_path(place, name))
    except OSError:
        sock.close()
        return None
    return sock


def _clean(place: int) -> None:
    """Removes the names of killed nodes: sockets without a listening process."""
    for name in _names(place):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.setblocking(False)
                try:
                    sock.connect(_path(place, name))
                except ConnectionRefusedError:
                    os.unlink(name, dir_fd=place)
