"""Cancelling and interrupting: queued, waiting for others, running, nested, deaf."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.processes import at_rest
from tests.support.waiting import PATIENCE_S, announce, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def impatient() -> Iterator[Cluster]:
    """One worker that may be killed, soon."""
    with hoplite_mp.Cluster(workers=1, config=hoplite_mp.Config(cancel_grace_s=0.3)) as made:
        yield made


@pytest.fixture(scope="module")
def patient() -> Iterator[Cluster]:
    """Two workers that have time to end what they were interrupted in."""
    with hoplite_mp.Cluster(2, config=hoplite_mp.Config(cancel_grace_s=PATIENCE_S)) as made:
        yield made


def announce_pid(path: str, seconds: float) -> None:
    Path(path).write_text(str(os.getpid()))
    announce(path + ".runs", seconds)


def announce_deaf(path: str) -> None:
    """Runs on through interrupts, as code does that is blocked outside Python."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # blocked here, another thread would be given it
    announce_pid(path, 60)


def swallow(path: str) -> str:
    while True:
        try:
            Path(path).touch()  # who sees the file may interrupt at once
            time.sleep(60)
        except BaseException:
            continue


def clean_up(path: str) -> None:
    try:
        announce(path)
    finally:
        Path(path + ".cleaned").touch()


def miss_the_first(path: str) -> None:
    """As code that was about to block when the signal came, and then blocks."""
    missed: list[int] = []
    listens = signal.signal(signal.SIGUSR1, lambda number, frame: missed.append(number))
    try:
        Path(path).touch()
        eventually(lambda: missed)
        signal.signal(signal.SIGUSR1, listens)  # the next signal may come at once
        time.sleep(60)
    finally:
        signal.signal(signal.SIGUSR1, listens)
        Path(path + ".cleaned").touch()


def clean_up_for_long(path: str) -> None:
    try:
        announce(path)
    finally:
        time.sleep(0.5)
        Path(path + ".cleaned").touch()


def announce_and_wait(path: str) -> None:
    Path(path).touch()
    wait_for(path + ".go")


def waits_for_another(path: str) -> None:
    cluster = hoplite_mp.current()
    cluster.options(timeout=60).submit(announce_and_wait, path).result()


def waits_in_place(path: str) -> None:
    hoplite_mp.current().submit(announce_and_wait, path).result()


def waits_for_a_ref(path: str, refs: list[Any]) -> None:
    Path(path).touch()
    hoplite_mp.current().get(refs)


def raises(kind: str) -> None:
    raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt("by hand")}[kind]


def test_a_forced_cancel_runs_what_cleans_up(patient: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "x"
    future = patient.submit(clean_up, str(path))
    eventually(path.exists)
    assert not future.cancel()
    assert future.cancel(force=True)
    assert (future.cancelled(), future.done(), future.running()) == (True, True, False)
    for ask in (future.result, future.exception, lambda: patient.get(future)):
        with pytest.raises(CancelledError):
            ask()
    eventually((tmp_path / "x.cleaned").exists)
    assert patient.submit(abs, -1).result(PATIENCE_S) == 1
    assert patient.stats()["workers_lost"] == 0


def test_an_interrupt_that_a_task_has_missed_is_repeated(patient: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "x"
    future = patient.submit(miss_the_first, str(path))
    eventually(path.exists)
    assert future.cancel(force=True)
    eventually((tmp_path / "x.cleaned").exists)


def test_what_cleans_up_is_interrupted_once(patient: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "x"
    future = patient.submit(clean_up_for_long, str(path))
    eventually(path.exists)
    assert future.cancel(force=True)
    eventually((tmp_path / "x.cleaned").exists)


@pytest.mark.parametrize("deaf", [announce_deaf, swallow])
def test_what_does_not_listen_is_killed_and_replaced(
    impatient: Cluster, tmp_path: Path, deaf: Any
) -> None:
    at_rest(impatient, 1)  # whoever was to be replaced before has been
    lost = impatient.stats()["workers_lost"]
    pid = impatient.submit(os.getpid).result(PATIENCE_S)
    future = impatient.submit(deaf, str(tmp_path / "x"))
    eventually((tmp_path / "x").exists)
    began = time.monotonic()
    assert future.cancel(force=True)
    assert impatient.submit(os.getpid).result(PATIENCE_S) != pid
    assert time.monotonic() - began > 0.25  # it had its time
    eventually(lambda: impatient.stats()["workers_lost"] == lost + 1)


@pytest.mark.parametrize("waits", [waits_for_another, waits_in_place])
def test_a_task_that_waits_for_another_is_cancelled(
    impatient: Cluster, tmp_path: Path, waits: Any
) -> None:
    path = tmp_path / "x"
    future = impatient.submit(waits, str(path))
    eventually(path.exists)
    assert future.cancel(force=True)
    with pytest.raises(CancelledError):
        future.result(PATIENCE_S)
    (tmp_path / "x.go").touch()
    assert impatient.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_a_task_inside_get_is_interrupted_not_killed(patient: Cluster, tmp_path: Path) -> None:
    cluster, lost = patient, patient.stats()["workers_lost"]
    pending = cluster.options(timeout=60).submit(wait_for, str(tmp_path / "go"))
    future = cluster.submit(waits_for_a_ref, str(tmp_path / "x"), hoplite_mp.by_ref([pending.ref]))
    eventually((tmp_path / "x").exists)
    assert future.cancel(force=True)
    (tmp_path / "go").touch()
    assert pending.result(PATIENCE_S)
    assert list(cluster.map(abs, range(40))) == list(range(40))
    assert cluster.stats()["workers_lost"] == lost


def test_what_needs_a_cancelled_task_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    blocked = [cluster.submit(wait_for, go) for _ in range(2)]
    first = cluster.submit(add, 1)
    chain = [first]
    for _ in range(5):
        chain.append(cluster.submit(add, chain[-1], 1))
    assert chain[3].cancel()  # it waits for an argument
    assert not chain[2].done()
    for future in chain[3:]:
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)
    Path(go).touch()
    assert chain[2].result(PATIENCE_S) == 3
    assert all(future.result(PATIENCE_S) for future in blocked)


def test_cancelled_while_somebody_waits(cluster: Cluster, tmp_path: Path) -> None:
    future = cluster.submit(announce, str(tmp_path / "x"))
    eventually((tmp_path / "x").exists)
    seen: list[Any] = []

    def waits(how: Any) -> None:
        try:
            how()
        except BaseException as error:
            seen.append(type(error))

    async def awaits() -> None:
        await future

    ways = [
        future.result,
        future.exception,
        lambda: cluster.get(future.ref),
        lambda: next(iter(concurrent.futures.as_completed([future]))).result(),
        lambda: asyncio.run(awaits()),
    ]
    threads = [threading.Thread(target=waits, args=(way,)) for way in ways]
    called = threading.Event()
    future.add_done_callback(lambda f: called.set())
    for thread in threads:
        thread.start()
    assert future.cancel(force=True)
    assert called.wait(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(seen) == len(ways)
    assert set(seen) <= {CancelledError, asyncio.CancelledError}


def test_cancelling_an_awaited_task(tmp_path: Path) -> None:
    async def run(cluster: Cluster) -> bool:
        go = str(tmp_path / "go")
        blocked = [cluster.submit(wait_for, go) for _ in range(2)]
        queued = cluster.submit(abs, -1)
        waiting = asyncio.ensure_future(asyncio.wrap_future(queued))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        Path(go).touch()
        for future in blocked:
            await future
        return queued.cancelled()

    with hoplite_mp.Cluster(workers=2) as made:  # without stand-ins from another test
        assert asyncio.run(run(made))


def test_many_cancels_at_every_moment(patient: Cluster) -> None:
    """Whatever the moment: cancelled, or the result, and the workers go on."""
    for force in (False, True):
        futures = [patient.submit(abs, -n) for n in range(300)]
        said = [future.cancel(force=True) if force else future.cancel() for future in futures]
        for n, (future, cancelled) in enumerate(zip(futures, said, strict=True)):
            assert future.cancelled() == cancelled
            if not cancelled:
                assert future.result(PATIENCE_S) == n
    assert list(patient.map(abs, range(100))) == list(range(100))


@pytest.mark.parametrize(
    ("kind", "expected"), [("exit", SystemExit), ("interrupt", KeyboardInterrupt)]
)
def test_what_a_task_raises_to_end_its_process(
    patient: Cluster, kind: str, expected: type[BaseException]
) -> None:
    lost = patient.stats()["workers_lost"]
    error = patient.submit(raises, kind).exception(PATIENCE_S)
    assert type(error) is hoplite_mp.TaskError
    assert type(error.__cause__) is expected
    assert error.__cause__.args == ((3,) if kind == "exit" else ("by hand",))
    assert list(patient.map(abs, range(40))) == list(range(40))
    assert patient.stats()["workers_lost"] == lost


def test_a_timeout_ends_the_worker_not_the_neighbours(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=2) as cluster:
        path = tmp_path / "pid"
        neighbour = cluster.submit(wait_for, str(tmp_path / "go"))
        for timeout in (1.0, 5.0, 25.0):
            slow = cluster.options(timeout=timeout, name="slow one")
            future = slow.submit(announce_deaf, str(path))
            with pytest.raises(hoplite_mp.HopliteTimeoutError, match="slow one"):
                future.result(PATIENCE_S)
            assert isinstance(future.exception(), TimeoutError)
            if path.exists():  # on a loaded machine it may not come so far
                break
        eventually(lambda: not Path(f"/proc/{path.read_text()}").exists())
        assert not neighbour.done()
        (tmp_path / "go").touch()
        assert neighbour.result(PATIENCE_S)
        assert cluster.options(timeout=20).submit(add, 1, 2).result(PATIENCE_S) == 3
        assert cluster.stats()["tasks_retried"] == 0  # retries are for deaths alone
