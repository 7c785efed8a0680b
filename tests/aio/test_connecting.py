"""`connect`: opening and leaving a cluster from within an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, Cluster
from hoplite_mp._api.aio import in_own_thread
from tests.support.functions import echo
from tests.support.waiting import PATIENCE_S, Run, file_exists_in_time

if TYPE_CHECKING:
    from pathlib import Path


def test_neither_opening_nor_leaving_blocks_the_loop(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked = threading.Event()

    class Opening(Cluster):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert ticked.wait(PATIENCE_S), "the loop stands still while this opens"
            super().__init__(*args, **options)

    monkeypatch.setattr("hoplite_mp._api.aio.Cluster", Opening)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.002)
                ticked.set()

        ticking = asyncio.ensure_future(tick())
        connecting = hoplite_mp.connect(1, memory="64MiB")
        async with connecting as c:
            assert isinstance(c, Cluster)
            assert hoplite_mp.current() is c
            assert (await c.submit(echo, 1)) == 1
            path = tmp_path / f"go{id(run)}"
            left = c.submit(file_exists_in_time, path)  # leaving waits for it, and it for the loop
            loop.call_later(0.3, path.touch)
        assert left.done()
        assert await left is True
        ticking.cancel()
        with pytest.raises(ClosedError):
            c.submit(echo, 1)
        with pytest.raises(RuntimeError, match="only once"):
            await connecting

    run(main())


def test_an_exception_interrupts_what_runs(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):  # noqa: PT012
            async with hoplite_mp.connect(1) as c:
                running = c.submit(file_exists_in_time, tmp_path / "never")
                waiting = c.submit(echo, 1)
                while not running.running():
                    await asyncio.sleep(0.01)
                raise KeyError("x")
        assert running.cancelled()
        assert waiting.cancelled()

    run(main())


def test_leaving_that_is_cancelled_does_not_wait_for_tasks(run: Run, tmp_path: Path) -> None:
    """As Ctrl-C in the end of `with`."""
    futures: list[Any] = []

    async def leave() -> None:
        async with hoplite_mp.connect(1) as c:
            futures.append(c.submit(file_exists_in_time, tmp_path / "never"))
            while not futures[0].running():
                await asyncio.sleep(0.01)

    async def main() -> None:
        task = asyncio.ensure_future(leave())
        while not futures or not futures[0].running():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert futures[0].cancelled(), "nobody has waited for its end"

    run(main())


def is_open() -> bool:
    try:
        hoplite_mp.current()
    except ClosedError:
        return False
    return True


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.06, 0.2])
def test_what_is_cancelled_while_it_opens_is_closed(run: Run, after_s: float) -> None:
    """The fixtures of all tests look for processes that stay behind."""

    async def main() -> None:
        opening = asyncio.ensure_future(asyncio.wait_for(_opened(), PATIENCE_S))
        await asyncio.sleep(after_s)
        opening.cancel()
        cluster = None
        try:
            cluster = await opening
        except asyncio.CancelledError:
            while is_open():  # until the thread has seen that nobody waits
                await asyncio.sleep(0.01)
        if cluster is not None:
            cluster.shutdown()

    async def _opened() -> Cluster:
        return await hoplite_mp.connect(1)

    run(main())


def test_a_loop_that_ends_while_it_opens(run: Run) -> None:
    before = set(psutil.Process().children())

    async def main() -> None:
        opening = asyncio.ensure_future(_open())
        await asyncio.sleep(0.01)
        assert not opening.done()

    async def _open() -> None:
        async with hoplite_mp.connect(1):
            await asyncio.sleep(60)

    run(main())
    gc.collect()
    # The thread that opens the cluster may not even have started its processes.
    while threads := [t for t in threading.enumerate() if t.name == "hoplite_mp connect"]:
        threads[0].join(PATIENCE_S)
        assert not threads[0].is_alive()
    assert set(psutil.Process().children()) <= before


def test_what_opening_raises(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="workers=-1"):
            await hoplite_mp.connect(-1)
        with pytest.raises(TypeError):
            async with hoplite_mp.connect(worker=1):
                pass
        config = hoplite_mp.Config(connect_timeout_s=0.2)
        with pytest.raises(hoplite_mp.ManagerLostError):
            async with hoplite_mp.connect(address="127.0.0.1:9", config=config, token="x" * 32):
                pass

    run(main())


def test_it_can_be_awaited_alone(run: Run) -> None:
    async def main() -> None:
        c = await hoplite_mp.connect(workers=1)
        assert await c.submit(echo, 3) == 3
        await asyncio.to_thread(c.shutdown)

    run(main())


def test_async_with_a_cluster_names_connect() -> None:
    async def enter(cluster: Any) -> None:
        async with cluster:
            pass

    with hoplite_mp.Cluster(workers=0) as c:
        for one in (c, c.options(retries=1)):
            with pytest.raises(TypeError, match=r"async with hoplite_mp\.connect"):
                asyncio.run(enter(one))
        assert c.get(c.put(1)) == 1, "it is still open"


def test_result_handed_over_to_a_cancelled_caller_is_disposed_of(run: Run) -> None:
    disposed: list[str] = []

    async def main() -> None:
        calling = asyncio.ensure_future(in_own_thread(lambda: "result", disposed.append))
        await asyncio.sleep(0)
        end_threads()  # the loop does not run meanwhile, so the hand-over waits for it
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        end_threads()
        assert disposed == ["result"]

    def end_threads() -> None:
        for thread in threading.enumerate():
            if thread.name == "hoplite_mp connect":
                thread.join(PATIENCE_S)

    run(main())
