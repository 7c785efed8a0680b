"""Workers' environment variables that set the threads and devices of libraries.

Libraries read these variables once, at import. The processes in a pool share their host's cores:
the number of threads of each numerical library (BLAS, OpenMP, Numba, torch) is the number of cores
divided by the number of the pool's processes on this host, but at least 1. An actor is the only
process in its pool, but programs usually have several actors, so each gets one thread unless the
user requests more. A worker with resources sees only its assigned devices.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BLAS_VARIABLES",
    "TBB_SHARES",
    "blas_environment",
    "blas_threads_here",
    "device_environment",
    "limit_blas",
    "record_user_settings",
    "set_blas_threads",
]


# torch reads the first and the third. Numba reads the last, even for its TBB and OpenMP layers.
BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
TBB_SHARES = "ENABLE_IPC"  # lets TBB's schedulers in several processes share the cores
_user_blas: dict[str, str] = {}


def record_user_settings() -> None:
    """Records the user's settings. Called before this process changes its environment."""
    _user_blas.update({k: os.environ[k] for k in BLAS_VARIABLES if k in os.environ})


def blas_environment(
    chosen: int | None, cores: int, processes: int, given: dict[str, str] | None = None
) -> dict[str, str]:
    """The variables for each process in a pool. The number of threads is Config.blas_threads
    (`chosen`), otherwise the user's setting, otherwise cores / processes. `processes`: the number
    of the pool's processes on this host; 0 for one thread each. `given`: the user's variables;
    None: the variables recorded by record_user_settings()."""
    count = str(chosen or max(1, cores // processes if processes else 1))
    given = _user_blas if given is None else given
    shares = {TBB_SHARES: os.environ.get(TBB_SHARES, "1")}
    if chosen:
        return {**dict.fromkeys(BLAS_VARIABLES, count), **shares}
    # Every BLAS uses OMP_NUM_THREADS unless its own variable is set.
    count = given.get("OMP_NUM_THREADS", count)
    return {**{name: given.get(name, count) for name in BLAS_VARIABLES}, **shares}


def limit_blas(environment: dict[str, str]) -> None:
    """Raises the number of threads in NumPy's OpenBLAS, which was loaded with a single thread."""
    first = environment["OPENBLAS_NUM_THREADS"].split(",")[0].strip()  # OpenMP allows a list
    threads = int(first) if first.isdecimal() else 1
    if threads > 1:
        set_blas_threads(threads)


def set_blas_threads(threads: int) -> None:
    """Sets the number of threads for each loaded OpenBLAS. Libraries that are loaded later read
    their environment variables."""
    for setter in _functions_of_openblas("set_num_threads"):
        setter(threads)


def blas_threads_here() -> int | None:
    """The number of threads that OpenBLAS uses in this process; None if it is not loaded."""
    return max((getter() for getter in _functions_of_openblas("get_num_threads")), default=None)


def _functions_of_openblas(name: str) -> Iterator[Any]:
    """Yields the function with that name in each loaded OpenBLAS."""
    try:
        with open("/proc/self/maps") as maps:  # the sixth field is the path, which may have spaces
            paths = {line.rstrip("\n").split(maxsplit=5)[5] for line in maps if "openblas" in line}
    except OSError:  # no /proc is mounted here
        return
    for path in paths:
        try:  # finds the loaded library by its name, even if the file has been replaced
            library = ctypes.CDLL(path.removesuffix(" (deleted)"), os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # a worker must not fail because of this
            continue
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                function = getattr(library, f"{prefix}_{name}{suffix}", None)
                if function is not None:
                    yield function


DEVICES = {"gpu": "CUDA_VISIBLE_DEVICES"}  # resource -> the variable that lists its devices


def device_environment(assigned: dict[str, list[int]]) -> dict[str, str]:
    """The variables for a worker. `assigned`: for each resource, the indices of the devices that
    are assigned to the worker as long as it runs. If this process may use only some devices, the
    indices refer to the list of these devices. A fraction of a device has no index, and leaves the
    variable unchanged."""
    found = {}
    for name, variable in DEVICES.items():
        given = [
            device.strip() for device in os.environ.get(variable, "").split(",") if device.strip()
        ]
        indices = assigned.get(name, ())
        if indices:
            names = (given[index] if index < len(given) else str(index) for index in indices)
            found[variable] = ",".join(names)
    return found
