"""joblib.Parallel, kept open. It writes large arrays to files that its workers map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.base import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class JoblibParallel(Peer):
    """joblib with its default backend."""

    name = "joblib"
    module = "joblib"

    def __init__(self, workers: int) -> None:
        from joblib import Parallel, delayed

        self._delayed = delayed
        self._parallel = Parallel(n_jobs=workers)
        self._parallel.__enter__()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        # joblib remembers by identity which arrays it has written to files; a view is a new array
        fresh = [arg.view() if isinstance(arg, np.ndarray) else arg for arg in args]
        [result] = self._parallel([self._delayed(fn)(*fresh)])
        return result

    def queue(self, fn: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        return list(self._parallel(self._delayed(fn)(item) for item in items))

    def close(self) -> None:
        self._parallel.__exit__(None, None, None)
