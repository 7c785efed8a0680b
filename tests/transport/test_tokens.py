"""Tokens: where they are looked for, who may read them, and that nobody ever sees them."""

from __future__ import annotations

import os
import pickle
import stat
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._transport.tokens import Token, load_token, token_path
from hoplite_mp.errors import AuthError

if TYPE_CHECKING:
    from hoplite_mp._protocol.secret import Secret

SECRET = "correct-horse-battery-staple"
OTHER = "another-token-of-enough-length"


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for variable in list(os.environ):
        if variable.startswith(("HOPLITE_MP_", "XDG_")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def written(path: Path, text: str = SECRET + "\n", mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def key(text: str) -> Secret:
    return Token(text).key


def test_argument_before_variable_before_file_before_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(tmp_path / ".config/hoplite_mp/token", "d" * 32)
    assert load_token().key == key("d" * 32)
    assert load_token().file == tmp_path / ".config/hoplite_mp/token"
    written(tmp_path / "x/hoplite_mp/token", "x" * 32)
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    assert load_token().key == key("d" * 32)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    assert load_token().key == key("x" * 32)
    monkeypatch.setenv("HOPLITE_MP_TOKEN_FILE", str(written(tmp_path / "named", "n" * 32)))
    assert load_token().key == key("n" * 32)
    monkeypatch.setenv("HOPLITE_MP_TOKEN", OTHER)
    assert load_token().key == key(OTHER)
    assert load_token().file is None
    assert load_token(written(tmp_path / "given", "g" * 32)).key == key("g" * 32)
    assert load_token(SECRET).key == key(SECRET)
    assert token_path(SECRET) is None
    assert token_path(Path("~/t")) == tmp_path / "t"


def test_the_same_token_from_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if it is no UTF-8."""
    raw = b"\xff\xfe" + SECRET.encode()
    path = written(tmp_path / "t")
    path.write_bytes(raw + b"\r\n")
    monkeypatch.setenv("HOPLITE_MP_TOKEN", os.fsdecode(raw))
    assert load_token().key == load_token(path).key == load_token(f" {os.fsdecode(raw)} ").key
    assert len(load_token().key.reveal()) == 32
    assert key(SECRET) != key(OTHER)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "t", mode=mode)
    with pytest.raises(AuthError, match=f"open to others .mode {mode:04o}.: chmod 600"):
        load_token(path)
    with pytest.raises(AuthError, match="open to others"):
        load_token(path, make=True)


def test_odd_files(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=r"no token: .*/\.config/hoplite_mp/token does not exist"):
        load_token()
    with pytest.raises(AuthError, match="is a directory: specify the file in it"):
        load_token(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)  # opening it would wait for a writer
    with pytest.raises(AuthError, match="not a regular file"):
        load_token(tmp_path / "fifo")
    with pytest.raises(AuthError, match="cannot be created"):
        load_token(written(tmp_path / "file") / "below", make=True)
    with pytest.raises(AuthError, match="is empty: copy it from the host where"):
        load_token(written(tmp_path / "empty", "\n"))
    with pytest.raises(AuthError, match="is empty: remove it, so that a new one is created"):
        load_token(tmp_path / "empty", make=True)
    with pytest.raises(TypeError, match="a string or a Path to read, not bytes"):
        load_token(b"x" * 32)  # type: ignore[arg-type]


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "t")
    status = list(path.stat())
    for owner, words in ((12345, "belongs to user 12345, not to you"), (0, None)):
        status[stat.ST_UID] = owner  # root may read everything anyway: its files are accepted
        seen = os.stat_result(status)
        monkeypatch.setattr(os, "fstat", lambda _, seen=seen: seen)
        if words is None:
            load_token(path)
        else:
            with pytest.raises(AuthError, match=words):
                load_token(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "   " + "x" * 15 + "   ", "x" * 1025])
def test_length(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthError, match=r"16 to 1024 are allowed. Create a random one: python3"):
        load_token(text)
    if text.strip():
        with pytest.raises(AuthError, match=f"the token in {tmp_path}/t has"):
            load_token(written(tmp_path / "t", text))
        monkeypatch.setenv("HOPLITE_MP_TOKEN", text)
        with pytest.raises(AuthError, match="the token in HOPLITE_MP_TOKEN has"):
            load_token()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_missing_file_is_made_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    old = os.umask(umask)
    try:
        made = load_token(folder / "t", make=True)
    finally:
        os.umask(old)
    assert made.file == folder / "t"
    assert stat.S_IMODE((folder / "t").stat().st_mode) == 0o600
    text = (folder / "t").read_text()
    assert len(text) == 44
    assert made.key == key(text)
    assert load_token(folder / "t", make=True).key == made.key  # it is made once
    assert load_token(folder / "other", make=True).key != made.key


def test_the_default_place_is_made_private(tmp_path: Path) -> None:
    load_token(make=True)
    folder = tmp_path / ".config/hoplite_mp"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_only_who_starts_a_cluster_makes_one(tmp_path: Path) -> None:
    with pytest.raises(AuthError):
        load_token(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_of_several_who_make_it_all_get_the_same(tmp_path: Path) -> None:
    keys: list[bytes] = []
    barrier = threading.Barrier(8)

    def make() -> None:
        barrier.wait()
        keys.append(load_token(tmp_path / "t", make=True).key.reveal())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(AuthError, match="cannot be written: No space left"):
        load_token(tmp_path / "t", make=True)
    assert not (tmp_path / "t").exists()


def test_nobody_sees_it(tmp_path: Path) -> None:
    token = Token(SECRET, tmp_path / "t")
    assert SECRET not in repr(token) + str(token) + f"{token!r}"
    assert not hasattr(token, "__dict__")
    with pytest.raises(TypeError, match="a secret"):
        pickle.dumps(token)
    for bad in (SECRET[:12], SECRET * 50):
        with pytest.raises(AuthError) as caught:
            Token(bad)
        assert SECRET[:12] not in "".join(traceback.format_exception(caught.value))
