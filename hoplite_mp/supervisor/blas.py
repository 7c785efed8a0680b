"""How many threads the BLAS library of each process uses.

Why it exists: workers would compete for the cores if each one's BLAS used all of them, and the
template from which they are forked must not have any threads.
It must never know: when workers start, what they compute.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp.protocol.local import Start

__all__ = [
    "BLAS_VARIABLES",
    "TBB_SHARES",
    "blas_environment",
    "limit_blas",
    "note_given",
    "set_blas_threads",
]

BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
TBB_SHARES = "ENABLE_IPC"  # makes TBB's schedulers in several processes share the cores
_given_blas: dict[str, str] = {}


def note_given() -> None:
    """Remembers what the user has set, before this process changes its own environment."""
    _given_blas.update({k: os.environ[k] for k in BLAS_VARIABLES if k in os.environ})


def blas_environment(start: Start) -> dict[str, str]:
    """Variables for each worker's BLAS: cores / workers threads, unless the user has set them."""
    chosen = start.config.get("blas_threads")
    count = str(chosen or max(1, start.cores // max(1, start.workers)))
    given = _given_blas
    shares = {TBB_SHARES: os.environ.get(TBB_SHARES, "1")}
    if chosen:
        return {**dict.fromkeys(BLAS_VARIABLES, count), **shares}
    # Every BLAS follows OMP_NUM_THREADS unless its own variable is set.
    count = given.get("OMP_NUM_THREADS", count)
    return {**{name: given.get(name, count) for name in BLAS_VARIABLES}, **shares}


def limit_blas(environment: dict[str, str]) -> None:
    """numpy's own OpenBLAS was loaded with one thread; raises that if the worker may use more."""
    first = environment["OPENBLAS_NUM_THREADS"].split(",")[0].strip()  # OpenMP allows a list
    threads = int(first) if first.isdecimal() else 1
    if threads > 1:
        set_blas_threads(threads)


def set_blas_threads(threads: int) -> None:
    """Sets the threads of each OpenBLAS that this process has loaded; libraries loaded later read
    their variables."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    for path in libraries:
        library = ctypes.CDLL(path)
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if setter is not None:
                    setter(threads)
