"""Functions whose globals are large arrays, and what they should give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._client import dirty_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster
    from hoplite_mp._serialize import Array

MIB = 1 << 20
WATCHES = dirty_pages.available()


def arrays_of(cluster: Cluster) -> Any:
    return cluster._runtime.submitter._functions._arrays


def scope_of(**values: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """A function and its globals; it gives a checksum of `x`."""
    scope = {"__name__": "a script", "np": np, **values}
    exec("def total(): return int(x.astype(np.int64).sum()), str(x.dtype), x.shape", scope)
    return scope, scope["total"]


def expected(x: Array) -> tuple[int, str, tuple[int, ...]]:
    return int(x.astype(np.int64).sum()), str(x.dtype), x.shape
