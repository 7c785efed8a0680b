"""How many threads the BLAS library of each process uses.

Why it exists: workers would compete for the cores if the BLAS of each used all of them, and the
template from which workers are forked must not have any threads.
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
    """Variables for each worker's BLAS: as many threads as Config.blas_threads says; else what the
    user has set; else cores / workers."""
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
    """Lets numpy's OpenBLAS, which was loaded with one thread, use more if the worker may."""
    first = environment["OPENBLAS_NUM_THREADS"].split(",")[0].strip()  # OpenMP allows a list
    threads = int(first) if first.isdecimal() else 1
    if threads > 1:
        set_blas_threads(threads)


def set_blas_threads(threads: int) -> None:
    """Sets the number of threads of each OpenBLAS that this process has loaded. Libraries that are
    loaded later read their environment variables."""
    with open("/proc/self/maps") as maps:  # the sixth field is the path, which may have spaces
        libraries = {line.rstrip("\n").split(maxsplit=5)[5] for line in maps if "openblas" in line}
    for path in libraries:
        try:  # found by the name by which it was loaded, also if the file was replaced since
            library = ctypes.CDLL(path.removesuffix(" (deleted)"), os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # a number of threads is no reason to end a worker
            continue
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if setter is not None:
                    setter(threads)
