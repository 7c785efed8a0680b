"""The executor of loky."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.base import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class LokyExecutor(Peer):
    """Fresh interpreters, cloudpickle."""

    name = "loky"
    module = "loky"

    def __init__(self, workers: int) -> None:
        from loky import ProcessPoolExecutor

        self._executor = ProcessPoolExecutor(workers)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._executor.submit(fn, *args).result()

    def queue(self, fn: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        futures = [self._executor.submit(fn, item) for item in items]
        return [future.result() for future in futures]

    def close(self) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)
