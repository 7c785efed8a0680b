"""The token, which is a cluster's secret: its sources, and the key derived from it.

Anybody who has the token can run code on every host in the cluster. It is read only from places
that no other user can read, generated with enough entropy, and never shown in arguments, messages,
reprs or logs. The sources, in order of precedence:

    token=text or Path > HOPLITE_MP_TOKEN > HOPLITE_MP_TOKEN_FILE > ~/.config/hoplite_mp/token
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from hoplite_mp._common import clock
from hoplite_mp._protocol.secret import Secret
from hoplite_mp.errors import AuthError

__all__ = ["Token", "default_path", "load_token", "token_path"]

TOKEN_BYTES = 32  # number of random bytes in a generated token
# An attacker who observes or forges one handshake can try a billion guesses per second offline. 16
# random characters cannot be guessed, but a 16-letter word can, so the error message suggests a
# random token.
TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 1024
VARIABLE, FILE_VARIABLE = "HOPLITE_MP_TOKEN", "HOPLITE_MP_TOKEN_FILE"
COPY_IT = "copy it from the host where `hoplite-mp up` runs, mode 0600"
MAKE_ONE = 'python3 -c "import secrets; print(secrets.token_urlsafe(32))"'
# How long an empty file is read again, because another process may be about to write the token, in
# a single write of 44 bytes.
WRITING_S_MAX = 1.0
WRITING_POLL_S = 0.01

# The token itself is not used as a key. Keys for different uses are derived with different labels
# (HKDF-Extract, RFC 5869, with the label as its salt).
_KEY_LABEL = b"hoplite_mp handshake key"


class Token:
    """A secret, and the key for handshakes that is derived from it. `file`: the file from which it
    was read, or None. The repr contains neither the secret nor the key."""

    __slots__ = ("_secret", "file", "key")

    def __init__(self, text: str, file: Path | None = None, source: str = "token=") -> None:
        """`source`: the origin of the text, for the error message. Raises AuthError if the text
        cannot be a token."""
        text = text.strip()
        if not TOKEN_CHARS_MIN <= len(text) <= TOKEN_CHARS_MAX:
            raise AuthError(
                f"the token in {source} has {len(text)} characters; {TOKEN_CHARS_MIN} to "
                f"{TOKEN_CHARS_MAX} are allowed. Create a random one: {MAKE_ONE}"
            )
        # Invalid UTF-8 in a file or a variable is represented by lone surrogates.
        secret = text.encode("utf-8", "surrogatepass")
        self._secret = Secret(secret)
        self.key = Secret(hmac.digest(_KEY_LABEL, secret, hashlib.sha256))
        self.file = file

    def reveal(self) -> str:
        """The secret itself. Only for the standard input of a process that will join."""
        return self._secret.reveal().decode("utf-8", "surrogatepass")

    def __repr__(self) -> str:
        return f"<Token of {self.file}>" if self.file else "<Token>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is a secret and cannot be pickled: send its key")


def load_token(argument: str | Path | None = None, *, make: bool = False) -> Token:
    """Reads the token from the first source that has one. make: whether to create a missing token
    file with a new token.

    Raises AuthError if there is no token, if it is too short, or if other users can read the file.
    """
    if isinstance(argument, str):
        return Token(argument)
    path = token_path(argument)
    if path is None:
        return Token(os.environ[VARIABLE], source=VARIABLE)
    if make:
        _make(path)
    return Token(_read(path, make), path, str(path))


def token_path(argument: str | Path | None = None) -> Path | None:
    """The file that `load_token` would read. None if the token is passed as text."""
    if isinstance(argument, Path):
        return _expand(argument)
    if argument is not None and not isinstance(argument, str):
        raise TypeError(f"token= is a string or a Path to read, not {type(argument).__name__}")
    if argument is not None or os.environ.get(VARIABLE):
        return None
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return _expand(Path(named))
    # According to the XDG specification, relative paths are ignored.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(base) / "hoplite_mp" / "token" if os.path.isabs(base) else default_path()


def default_path() -> Path:
    """The token file that is used if the environment does not specify another."""
    return _expand(Path("~/.config")) / "hoplite_mp" / "token"


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise AuthError(f"there is no token: {path} cannot be resolved: {error}") from error


def _read(path: Path, make: bool) -> str:
    """Waits until the file is not empty, and returns its text. Raises AuthError if other users can
    read the file. make: whether the caller would create a missing file."""
    end = clock.monotonic() + WRITING_S_MAX
    while not (text := _read_now(path)):
        if clock.monotonic() > end:
            remedy = "remove it, so that a new one is created" if make else COPY_IT
            raise AuthError(f"the token file {path} is empty: {remedy}")
        clock.sleep(WRITING_POLL_S)
    return text


def _read_now(path: Path) -> str:
    try:
        # O_NONBLOCK, because opening a named pipe would otherwise wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise AuthError(
            f"there is no token: {path} does not exist: {COPY_IT}, or specify another source with "
            f"token=, --token-file, {FILE_VARIABLE} or {VARIABLE}"
        ) from None
    except OSError as error:
        raise AuthError(
            f"the token file {path} cannot be read by user {os.geteuid()}: {error.strerror}. It "
            "must be a file that belongs to this user, mode 0600"
        ) from error
    try:
        _check_file(path, os.fstat(fd))
        data = os.read(fd, 4 * TOKEN_CHARS_MAX + 1)
    finally:
        os.close(fd)
    return data.decode("utf-8", "surrogateescape").strip()


def _check_file(path: Path, status: os.stat_result) -> None:
    """Raises AuthError unless the file is private to its owner, who must be this user or root.
    status: the status of the open file, because the path may now refer to another file."""
    if stat.S_ISDIR(status.st_mode):
        raise AuthError(f"the token file {path} is a directory: specify the file in it")
    if not stat.S_ISREG(status.st_mode):
        raise AuthError(f"the token file {path} is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise AuthError(f"the token file {path} belongs to user {status.st_uid}, not to you")
    if status.st_mode & 0o077:
        raise AuthError(
            f"the token file {path} is open to others (mode {status.st_mode & 0o777:04o}): "
            f"chmod 600 {path}, and create a new token if another user may have read it"
        )


def _make(path: Path) -> None:
    """Writes a new token if the file does not exist. If several processes try, one succeeds."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            return
        raise AuthError(f"the token file {path} cannot be created: {error.strerror}") from error
    try:
        with open(fd, "wb", buffering=0) as file:
            os.fchmod(fd, 0o600)  # independent of the umask
            data = secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n"
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise AuthError(f"the token file {path} cannot be written: {error.strerror}") from error
