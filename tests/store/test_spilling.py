"""Over the limit: what is least recently used and not pinned goes to a disk and comes back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ConfigError, HopliteTimeoutError, ObjectLostError, StoreFullError
from tests.support.functions import checksum, echo
from tests.support.processes import processes_named
from tests.support.store import LIMIT, computed, header, open_spilling, spilled_array
from tests.support.values import MIB, mib
from tests.support.waiting import eventually, settles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

LONG_S = 300.0  # for room, where nobody should wait for it: longer than a test may take


@pytest.fixture
def c(tmp_path: Path) -> Iterator[Cluster]:
    with open_spilling(tmp_path) as made:
        yield made


def state(c: Cluster, ref: Any) -> str:
    return str(header(c, ref)["state"])


def next_stamp() -> None:
    """When an object was used is known to a 64th of a second; two of them lie in between."""
    stamp = int(time.monotonic() * 64)
    eventually(lambda: int(time.monotonic() * 64) > stamp + 1, "the next stamp")


@contextlib.contextmanager
def patient(c: Cluster) -> Iterator[None]:
    """Puts and gets of this process wait long enough for space on a busy machine."""
    memory = c._runtime.memory
    before = memory.config
    memory.config = dataclasses.replace(before, put_wait_s=LONG_S)
    try:
        yield
    finally:
        memory.config = before


def pin_and_wait(arrays: Any, path: str) -> int:
    Path(path + ".here").touch()
    eventually(Path(path).exists, path)
    return checksum(arrays[0])


@pytest.mark.parametrize("memory", [LIMIT, "32MiB", "33554432"])
def test_the_limit_is_what_was_asked_for(memory: Any) -> None:
    with hoplite_mp.Cluster(workers=0, memory=memory) as c:
        assert c.stats()["bytes_limit"] == LIMIT
        assert c.nodes[0].memory_total == LIMIT


def test_four_times_the_limit_comes_back_whole(c: Cluster, tmp_path: Path) -> None:
    refs = [c.put(spilled_array(seed)) for seed in range(30)]
    stats = c.stats()
    assert stats["bytes_used"] <= LIMIT
    assert stats["bytes_spilled"] >= 30 * 4 * MIB - LIMIT
    assert os.listdir(tmp_path) == [], "the file has a name"
    for seed, ref in enumerate(refs):
        assert (c.get(ref) == spilled_array(seed)).all()
    assert [f.result() for f in [c.submit(checksum, ref) for ref in refs]] == [
        checksum(spilled_array(seed)) for seed in range(30)
    ]
    assert all(c.locations(ref) for ref in refs)
    del ref, refs
    settles(lambda: c.stats()["bytes_spilled"], 0)


def test_the_least_recently_used_goes_first(c: Cluster) -> None:
    refs = [c.put(spilled_array(seed)) for seed in range(6)]
    next_stamp()
    refs.append(c.put(spilled_array(6)))
    for index in (0, 2, 4):
        c.get(refs[index])
    next_stamp()
    more = [c.put(spilled_array(seed)) for seed in range(3)]
    assert [state(c, ref) for ref in refs] == [
        "SEALED" if index in (0, 2, 4, 6) else "SPILLED" for index in range(7)
    ]
    assert [state(c, ref) for ref in more] == ["SEALED"] * 3


def test_pinned_objects_stay(c: Cluster) -> None:
    pinned = c.put(spilled_array(1))
    array = c.get(pinned)
    others = [c.put(spilled_array(seed)) for seed in range(20)]
    assert state(c, pinned) == "SEALED"
    assert (array == spilled_array(1)).all()
    assert c.stats()["bytes_spilled"] > 0
    del others


def test_spilled_objects_can_be_deleted_dropped_and_waited_for(c: Cluster) -> None:
    refs = [c.put(spilled_array(seed)) for seed in range(20)]
    assert state(c, refs[0]) == state(c, refs[1]) == "SPILLED"
    assert c.wait(refs, timeout=0) == (refs, [])
    before = c.stats()["bytes_spilled"]
    c.delete(refs[0])
    with pytest.raises(ObjectLostError):
        c.get(refs[0])
    refs[1] = refs[2]
    settles(lambda: c.stats()["bytes_spilled"], before - 2 * (4 * MIB + 4096))


def test_refs_inside_a_spilled_object_hold(c: Cluster) -> None:
    nested = c.put([c.put(7), c.put(spilled_array(3)), spilled_array(9)])
    fill = [c.put(spilled_array(seed)) for seed in range(20)]
    assert state(c, nested) == "SPILLED"
    inner = c.get(nested)
    assert c.get(inner[0]) == 7
    assert (c.get(inner[1]) == spilled_array(3)).all()
    del fill


def nested_refs() -> Any:
    me = hoplite_mp.current()
    return me.put([me.put(5), spilled_array(1)])


def test_refs_inside_a_spilled_object_of_a_dead_worker_hold(c: Cluster) -> None:
    ref = c.submit(nested_refs).result()
    fill = [c.put(spilled_array(seed)) for seed in range(20)]
    assert state(c, ref) == "SPILLED"
    arrays = [c.get(other) for other in fill[:7]]  # no room to bring it back while sweeping
    c.submit(os._exit, 1).exception()
    settles(lambda: c.stats()["workers_lost"] > 0, True)
    del arrays
    assert c.get(c.get(ref)[0]) == 5


def test_results_of_tasks_over_the_limit(c: Cluster) -> None:
    futures = [c.submit(spilled_array, seed) for seed in range(20)]
    # A Future keeps the value that result() returned, and so would pin them all.
    assert all((c.get(future) == spilled_array(seed)).all() for seed, future in enumerate(futures))


def test_many_small_objects_over_the_limit(c: Cluster) -> None:
    begun = computed(c)
    refs = [c.put(np.full(2000, number, np.int16)) for number in range(20_000)]  # 80 MB
    assert computed(c) - begun < 6  # 0.6 s
    assert c.stats()["bytes_used"] <= LIMIT
    assert c.stats()["bytes_spilled"] > 0
    for number in (0, 1, 777, 10_000, 19_999):
        assert set(c.get(refs[number]).tolist()) == {number}
    assert c.submit(checksum, refs[5]).result() == 10_000
    del refs
    settles(lambda: c.stats()["bytes_spilled"], 0)


def test_many_small_objects_come_back_one_by_one() -> None:
    with hoplite_mp.Cluster(2, memory="2MiB") as c:
        refs = [c.put(bytes([number % 256]) * 5000) for number in range(3000)]
        begun = computed(c)
        assert all(c.get(ref)[0] == number % 256 for number, ref in enumerate(refs))
        assert computed(c) - begun < 5  # 0.5 s; 10 s when each looked at all headers
        del refs
        settles(lambda: c.stats()["bytes_spilled"], 0)


def test_a_full_spill_file_is_purged_before_it_refuses(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=LONG_S, spill_bytes_max=9 * MIB) as c:
        refs = [c.put(spilled_array(seed)) for seed in range(9)]
        for seed in range(9, 30):
            del refs[0]  # on the disk
            refs.append(c.put(spilled_array(seed)))
        del refs[3:5]
        assert all(
            (c.get(ref) == spilled_array(21 + seed)).all() for seed, ref in enumerate(refs[:3])
        )


def test_small_objects_where_each_span_has_one_in_use(c: Cluster) -> None:
    refs = [c.put(np.full(2000, number, np.int16)) for number in range(6000)]
    arrays = [c.get(ref) for ref in refs[::100]]
    refs += [c.put(np.full(2000, number, np.int16)) for number in range(6000, 12_000)]
    assert all(int(array[0]) == 100 * n for n, array in enumerate(arrays))
    assert [int(c.get(refs[n])[0]) for n in range(0, 12_000, 997)] == list(range(0, 12_000, 997))


def test_a_large_object_displaces_small_ones(c: Cluster) -> None:
    refs = [c.put(np.full(2000, number, np.int16)) for number in range(7000)]
    big = c.put(mib(20))
    assert checksum(c.get(big)) == checksum(mib(20))
    assert int(c.get(refs[0])[0]) == 0


# -- full ----------------------------------------------------------------------------------------


def test_everything_pinned(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=0.5) as c:
        arrays = [c.get(c.put(spilled_array(seed))) for seed in range(7)]
        value = mib(8)
        begun = time.monotonic()
        with pytest.raises(StoreFullError) as caught:
            c.put(value)
        assert time.monotonic() - begun >= 0.5
        text = str(caught.value)
        assert re.match(r"put of 8(\.0)? MiB: store of h0 holds (28|29)(\.\d)? ", text)
        assert "of 32 MiB" in text
        assert re.search(rf"28(\.0)? MiB pinned by arrays in process {os.getpid()}\b", text)
        assert text.endswith("Free arrays, or raise memory=.")
        assert isinstance(caught.value, MemoryError)
        with pytest.raises(StoreFullError):
            c.empty(8 * MIB, np.uint8)
        with pytest.raises(StoreFullError, match=r"^result of 8.*pinned by arrays"):
            c.submit(mib, 8).result()
        assert c.submit(echo, 5).result() == 5
        assert all((array == spilled_array(seed)).all() for seed, array in enumerate(arrays))
        del arrays
        with patient(c):
            assert checksum(c.get(c.put(mib(8)))) == checksum(mib(8))


def test_what_is_larger_than_the_store_never_has_room(tmp_path: Path) -> None:
    why = r"4[08](\.0)? MiB: that is larger than the whole store of h0 \(32 MiB\): raise memory=$"
    with open_spilling(tmp_path) as c:
        with pytest.raises(StoreFullError, match=f"^put of {why}"):
            c.put(mib(48))
        with pytest.raises(StoreFullError, match=f"^empty of {why}"):
            c.empty(40 * MIB, np.uint8)
        with pytest.raises(StoreFullError, match=f"^result of {why}"):
            c.submit(mib, 48).result()


def test_a_few_small_arrays_in_every_span(tmp_path: Path) -> None:
    """They pin little, but no span is empty; the error tells where the room is."""
    with open_spilling(tmp_path, put_wait_s=0.3) as c:
        with patient(c):
            refs = [c.put(np.full(2000, seed)) for seed in range(1700)]
        kept = [c.get(ref) for ref in refs[::40]]
        del refs
        with pytest.raises(StoreFullError, match=r"MiB free between small objects"):
            c.put(mib(10))
        assert [int(array[0]) for array in kept] == list(range(0, 1700, 40))


def test_what_another_process_pins_is_named(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=0.3) as c:
        gate = str(tmp_path / "gate")
        task = c.submit(pin_and_wait, [c.put(spilled_array(s)) for s in range(6)], gate)
        eventually(Path(gate + ".here").exists, "the task")
        worker = c.submit(echo, 1)  # queued behind it
        with pytest.raises(StoreFullError, match=r"24(\.0)? MiB pinned by arrays in process \d+"):
            c.put(mib(12))
        Path(gate).touch()
        assert task.result() == checksum(spilled_array(0))
        assert worker.result() == 1


def test_room_that_comes_while_waiting(c: Cluster) -> None:
    arrays = [c.get(c.put(spilled_array(seed))) for seed in range(7)]
    value, cleared = mib(16), []

    def clear() -> None:
        cleared.append(time.monotonic())
        arrays.clear()

    timer = threading.Timer(0.3, clear)
    timer.start()
    ref = c.put(value)
    ended = time.monotonic()
    timer.join()
    assert ended > cleared[0], "it did not wait"
    assert checksum(c.get(ref)) == checksum(value)


def test_larger_than_the_limit_fails_at_once(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=LONG_S) as c:
        attempts_that_fail_at_once(c)


def attempts_that_fail_at_once(c: Cluster) -> None:
    for attempt in (
        lambda: c.put(np.zeros(LIMIT, np.uint8)),
        lambda: c.empty(LIMIT, np.uint8),
        lambda: c.submit(np.zeros, LIMIT, np.uint8).result(),
    ):
        begun = time.monotonic()
        with pytest.raises(StoreFullError, match=r"larger than the whole store of h0 \(32 MiB\)"):
            attempt()
        assert time.monotonic() - begun < LONG_S / 10


def test_get_of_a_spilled_object_without_room(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=0.3) as c:
        with patient(c):
            refs = [c.put(spilled_array(seed)) for seed in range(12)]
            arrays = [c.get(ref) for ref in refs[-7:]]
        assert state(c, refs[0]) == "SPILLED"
        with pytest.raises(HopliteTimeoutError):
            c.get(refs[0], timeout=0)
        with pytest.raises(StoreFullError):
            c.get(refs[0])
        del arrays[:3]
        with patient(c):
            assert (c.get(refs[0]) == spilled_array(0)).all()


# -- disks that do not take it -------------------------------------------------------------------


def test_spill_bytes_max(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=0.3, spill_bytes_max=9 * MIB) as c:
        with patient(c):
            refs = [c.put(spilled_array(seed)) for seed in range(9)]
        assert 0 < c.stats()["bytes_spilled"] <= 9 * MIB
        with pytest.raises(StoreFullError, match="spill_bytes_max"):
            refs += [c.put(spilled_array(seed)) for seed in range(9, 12)]
        del refs[3:5]
        with patient(c):
            found = [c.get(ref) for ref in refs[:3]]
        assert all((array == spilled_array(seed)).all() for seed, array in enumerate(found))


def test_spill_bytes_max_0_means_none(tmp_path: Path) -> None:
    with open_spilling(tmp_path, put_wait_s=0.2, spill_bytes_max=0) as c:
        refs = [c.put(spilled_array(seed)) for seed in range(7)]
        with pytest.raises(StoreFullError):
            c.put(spilled_array(8))
        assert c.stats()["bytes_spilled"] == 0
        assert len(refs) == 7


@pytest.mark.parametrize("directory", ["missing", "a file"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, directory: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(
        ConfigError, match=rf"^spill_dir='.*/{directory}' is not a directory on this"
    ):
        open_spilling(tmp_path / directory)
    with open_spilling(tmp_path / directory, spill_bytes_max=0) as c:  # nothing is to be spilled
        assert c.get(c.put(spilled_array(1))).nbytes == spilled_array(1).nbytes


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *how: path != str(tmp_path) and access(path, *how)
    )
    with pytest.raises(ConfigError, match="this process cannot write to it"):
        open_spilling(tmp_path)


def test_a_directory_that_goes_away(tmp_path: Path) -> None:
    directory = tmp_path / "going"
    directory.mkdir()
    with open_spilling(directory, put_wait_s=0.2) as c:
        directory.rmdir()
        refs = [c.put(spilled_array(seed)) for seed in range(7)]
        with pytest.raises(StoreFullError, match="going"):
            c.put(spilled_array(8))
        assert all((c.get(ref) == spilled_array(seed)).all() for seed, ref in enumerate(refs))


def test_a_disk_that_does_not_give_back(tmp_path: Path) -> None:
    """Its readers hear of it, on this and the other ways to a spilled object; the host lives on."""
    with open_spilling(tmp_path) as c:
        refs = [c.put(spilled_array(seed)) for seed in range(12)]
        spilled = [ref for ref in refs if state(c, ref) == "SPILLED"]
        assert len(spilled) > 2
        kept = [ref for ref in refs if ref not in spilled]
        del refs, kept  # there is room: nothing is written to the file any more
        (node,) = processes_named("hoplite node")
        (file,) = [
            link for link in Path(f"/proc/{node.pid}/fd").iterdir()
            if os.readlink(link).startswith(str(tmp_path))
        ]  # fmt: skip
        os.truncate(file, 0)
        lost = r"is lost: its bytes cannot be read from the disk: the spill file is shorter"
        with pytest.raises(ObjectLostError, match=lost):
            c.get(spilled[0])
        with pytest.raises(ObjectLostError, match=lost):
            c.get(spilled[0])
        with pytest.raises(ObjectLostError, match=lost):
            c.submit(checksum, spilled[1]).result()
        again = c.put(spilled_array(1))
        assert (c.get(again) == spilled_array(1)).all()


def test_a_full_disk(tiny_disk: Path) -> None:
    with open_spilling(tiny_disk, put_wait_s=0.3) as c:
        with patient(c):  # what fits into memory, and one into the file
            refs = [c.put(spilled_array(seed)) for seed in range(8)]
        with pytest.raises(StoreFullError, match="No space left"):
            c.put(spilled_array(8))
        assert c.stats()["bytes_spilled"] == 4 * MIB + 4096
        with pytest.raises(StoreFullError, match="No space left"):
            c.get(refs[0])  # it is in the file, and nothing can leave the memory for it
        del refs[-1]
        with patient(c):
            for seed, ref in enumerate(refs):
                assert (c.get(ref) == spilled_array(seed)).all()
        assert c.submit(checksum, refs[0]).result() == checksum(spilled_array(0))
        del ref, refs[:4]
        with patient(c):
            assert (c.get(c.put(spilled_array(40))) == spilled_array(40)).all()
