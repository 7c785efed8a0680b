"""The spill file on a real disk."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._node.io import spill_file
from hoplite_mp._node.io.spill_file import SpillFile, default_directory, is_tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    made = SpillFile(str(tmp_path), None)
    yield made
    made.close()


def read(file: SpillFile, position: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    file.read(position, memoryview(into))
    return bytes(into)


def few_at_a_time(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """As the system does with more than 2 GiB, and with a disk that is nearly full."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:most]], at))


@pytest.mark.parametrize("most", [1 << 30, 1000])
def test_spill_file_returns_written_bytes(
    file: SpillFile, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    few_at_a_time(monkeypatch, most)
    texts = [bytes([number]) * (5000 + number) for number in range(1, 4)]
    places = [file.write(memoryview(text)) for text in texts]
    for text, place in zip(texts, places, strict=True):
        assert place is not None
        same = read(file, place, len(text)) == text
        assert same


def test_spill_file_has_no_name_and_frees_disk_blocks(file: SpillFile, tmp_path: Path) -> None:
    places = [file.write(memoryview(b"x" * 65536)) for _ in range(2)]
    assert list(tmp_path.iterdir()) == []
    blocks = os.fstat(file._fd).st_blocks
    assert not os.get_inheritable(file._fd)
    assert places[0] is not None
    file.free(places[0])
    assert os.fstat(file._fd).st_blocks == blocks - 65536 // 512
    assert file.used == 65536
    assert file.write(memoryview(b"y" * 65536)) == places[0]


def test_spill_file_respects_its_size_limit(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path), 1 << 17)
    assert file.write(memoryview(b"x" * (1 << 16))) is not None
    assert file.write(memoryview(b"x" * (1 << 17))) is None
    assert file.write(memoryview(b"x" * (1 << 16))) is not None
    file.close()


def test_spill_file_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would close what has its number then."""
    file = SpillFile(str(tmp_path), None)
    file.close()
    file.write(memoryview(b"x"))
    closed: list[int] = []
    number, close = file._fd, os.close
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", closed.append)
        file.close()
        file.close()
    assert closed == [number]
    close(number)


def test_failed_write_takes_no_space(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="full"):
            file.write(memoryview(b"x" * 5000))
    assert file.used == 0


def test_tmpfs_directory_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert is_tmpfs("/dev/shm")
    assert not is_tmpfs("/proc")
    assert is_tmpfs(str(tmp_path / "nowhere"))
    found = {"/dev/shm": True, "/var/tmp": False}
    monkeypatch.setattr(spill_file.tempfile, "gettempdir", lambda: "/dev/shm")
    monkeypatch.setattr(spill_file, "is_tmpfs", lambda path: found.get(path, True))
    assert default_directory() == "/var/tmp"
