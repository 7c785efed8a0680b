"""Names of nodes in a directory: taken, given back, left behind; which directories are not used."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._transport.rendezvous import Rendezvous, Sole, anybody, folders, peer_of, reach

if TYPE_CHECKING:
    from pathlib import Path

ONE, OTHER = bytes(range(16)), bytes(range(16, 32))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first directory; there is none yet."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "runtime" / "hoplite_mp"


def taken(cluster: bytes) -> Rendezvous:
    meeting = Rendezvous.open(cluster)
    assert meeting is not None
    return meeting


def leave_a_name(folder: Path, cluster: bytes) -> None:
    """As one who is killed does."""
    place = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"/proc/self/fd/{place}/{cluster.hex()}")  # the path itself may be too long
    os.close(place)


def test_a_name_is_found_and_given_back(folder: Path) -> None:
    assert not anybody()
    assert reach(ONE, 1.0) is None
    meeting = taken(ONE)
    assert os.listdir(folder) == [ONE.hex()]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert anybody()
    assert reach(OTHER, 1.0) is None
    sock = reach(ONE, 1.0)
    assert sock is not None
    with sock:
        assert peer_of(sock) == (os.getpid(), os.geteuid())
    meeting.close()
    assert not folder.exists()
    assert reach(ONE, 1.0) is None


def test_one_name_for_one_node(folder: Path) -> None:
    first, other = taken(ONE), taken(OTHER)
    assert Rendezvous.open(ONE) is None
    other.close()
    assert os.listdir(folder) == [ONE.hex()]
    first.close()
    taken(ONE).close()
    assert not folder.exists()


def test_dead_names_are_replaced_and_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for cluster in (ONE, OTHER):
        leave_a_name(folder, cluster)
    (folder / "something else").touch()
    assert anybody()
    assert reach(ONE, 1.0) is None
    meeting = taken(ONE)
    assert sorted(os.listdir(folder)) == [ONE.hex(), "something else"]
    sock = reach(ONE, 1.0)
    assert sock is not None
    sock.close()
    meeting.close()
    assert os.listdir(folder) == ["something else"]


def test_a_name_that_was_removed_and_taken_again(folder: Path) -> None:
    """The first one does not remove the second one's."""
    first = taken(ONE)
    (folder / ONE.hex()).unlink()
    second = taken(ONE)
    first.close()
    assert os.listdir(folder) == [ONE.hex()]
    second.close()
    assert not folder.exists()


def test_of_many_at_once_one_gets_the_name(folder: Path) -> None:
    """Over a dead one's; nobody removes a living one's."""
    for _ in range(50):
        folder.mkdir(mode=0o700, exist_ok=True)
        leave_a_name(folder, ONE)
        found: list[Rendezvous | None] = []
        begin = threading.Barrier(4)

        def take(found: list[Rendezvous | None] = found, begin: threading.Barrier = begin) -> None:
            begin.wait()
            found.append(Rendezvous.open(ONE))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [one for one in found if one is not None]
        sock = reach(ONE, 1.0)
        assert sock is not None
        sock.close()
        winner.close()
        assert not folder.exists()


def test_directories_that_are_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Open to others, or a link, or a file: the next one is used; without any, none."""
    second = folders()[1]
    assert second == str(tmp_path / "tmp" / f"hoplite_mp-{os.geteuid()}")
    for bad in ("open", "link", "file"):
        caplog.clear()
        if bad == "open":
            folder.mkdir()
            folder.chmod(0o770)
        elif bad == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.touch()
        meeting = taken(ONE)
        assert os.listdir(second) == [ONE.hex()]
        assert "not used for sockets" in caplog.text
        sock = reach(ONE, 1.0)
        assert sock is not None
        sock.close()
        meeting.close()
        folder.rmdir() if bad == "open" else folder.unlink()
    folder.touch()
    os.symlink(tmp_path / "elsewhere", second)
    with pytest.raises(OSError, match="no directory"):
        Rendezvous.open(ONE)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes another user's directory")
def test_a_directory_of_somebody_else(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    meeting = taken(ONE)
    assert os.listdir(folder) == []
    assert "belongs to user 65534" in caplog.text
    meeting.close()


def test_where_no_runtime_directory_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert folders() == [str(tmp_path / "tmp" / f"hoplite_mp-{os.geteuid()}")]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.delenv("TMPDIR")
    assert folders() == [f"/tmp/hoplite_mp-{os.geteuid()}"]
    # A runtime directory that does not exist is not made: the next one is used.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 40) / ("name" * 40)))
    os.makedirs(os.environ["TMPDIR"])
    meeting = taken(ONE)
    assert os.listdir(folders()[1]) == [ONE.hex()]
    sock = reach(ONE, 1.0)
    assert sock is not None
    sock.close()
    meeting.close()


def test_the_sole_one_of_a_host(folder: Path) -> None:
    """Until it says so, or ends; its file is no node's name."""
    first = Sole.take("keeper-1")
    assert first is not None
    assert Sole.take("keeper-1") is None
    assert Sole.holder("keeper-1") == os.getpid()
    assert Sole.holder("keeper-2") is None
    other = Sole.take("keeper-2")
    assert other is not None
    assert not anybody()
    other.close()
    first.close()
    assert not folder.exists()
    again = Sole.take("keeper-1")
    assert again is not None
    again.close()


def test_one_that_is_killed_is_it_no_more(folder: Path) -> None:
    program = (
        "import os; from hoplite_mp._transport.rendezvous import Sole; "
        "assert Sole.take('keeper-1'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -9
    assert os.listdir(folder) == ["keeper-1.lock"]
    assert Sole.holder("keeper-1") is None
    mine = Sole.take("keeper-1")
    assert mine is not None
    mine.close()
    assert not folder.exists()


def test_of_many_who_try_at_once_one_is_it(folder: Path) -> None:
    """Also while others close theirs, which removes the file."""
    held, most = [0], [0]
    guard = threading.Lock()

    def work() -> None:
        for _ in range(200):
            sole = Sole.take("keeper-1")
            if sole is None:
                continue
            with guard:
                held[0] += 1
                most[0] = max(most[0], held[0])
            with guard:
                held[0] -= 1
            sole.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_nodes_that_come_while_others_leave_share_one_directory(folder: Path) -> None:
    """The last one of a directory removes it, also under one that has just opened it."""
    elsewhere: list[str] = []

    def work(number: int) -> None:
        for turn in range(200):
            meeting = Rendezvous.open(bytes([number, turn]) * 8)
            if meeting is None:  # somebody else was just changing the directory
                continue
            if meeting._folder != str(folder):
                elsewhere.append(meeting._folder)
            meeting.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not elsewhere


def test_a_directory_that_is_removed_at_the_last_moment_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, []

    def late(place: int, how: int) -> None:
        flock(place, how)
        if not removed:
            removed.append(folder.rmdir())

    monkeypatch.setattr(fcntl, "flock", late)
    meeting = taken(ONE)
    assert meeting._folder == str(folder)
    assert os.listdir(folder) == [ONE.hex()]
    meeting.close()
