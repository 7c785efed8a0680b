"""concurrent.futures.ProcessPoolExecutor, forked and spawned."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.base import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class _Pool(Peer):
    module = "concurrent.futures"
    start_method: ClassVar[str]

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context(self.start_method)
        self._executor = ProcessPoolExecutor(workers, mp_context=context)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._executor.submit(fn, *args).result()

    def queue(self, fn: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        futures = [self._executor.submit(fn, item) for item in items]
        return [future.result() for future in futures]

    def map(self, fn: Callable[..., Any], items: Iterable[Any], chunksize: int) -> Iterator[Any]:
        """As the executor's own."""
        return self._executor.map(fn, items, chunksize=chunksize)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class ForkPool(_Pool):
    """Workers are copies of this process."""

    name = "ProcessPoolExecutor(fork)"
    start_method = "fork"


class SpawnPool(_Pool):
    """Workers are fresh interpreters."""

    name = "ProcessPoolExecutor(spawn)"
    start_method = "spawn"
