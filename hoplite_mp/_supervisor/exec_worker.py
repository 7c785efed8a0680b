"""A worker that has its own environment, and is therefore not a fork of the template.

Libraries read environment variables when they are imported or loaded: OpenBLAS for its number of
threads, NumPy for its CPU features, CUDA for its devices, the C library for its allocator. The
template has already imported NumPy, so a worker with `options(env=)` executes the interpreter
again, with that environment. This takes as long as importing NumPy (0.15 s).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from hoplite_mp._protocol.spawning import InheritedContext
from hoplite_mp._supervisor.environment import BLAS_VARIABLES
from hoplite_mp._supervisor.processes import leave

if TYPE_CHECKING:
    from hoplite_mp._protocol.local import Spawn, Start
    from hoplite_mp._protocol.spawning import Environment

__all__ = ["begin", "environment_of", "exec_interpreter"]

WORKER_MAIN = ("hoplite_mp._worker.main", "main")
PR_SET_NAME = 15
EVERY_BLAS = "OMP_NUM_THREADS"  # applies to each BLAS whose own variable is not set


class _Arguments(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of the worker's entry point, in order."""

    control_fd: int
    store_fd: int
    event_fd: int
    rpc_fd: int
    slot: int
    pool: int
    max_tasks: int
    setup: int
    output_owner: int
    label: str
    config: dict[str, Any]
    inherited_settings: InheritedContext
    inherited: list[int]


def environment_of(
    here: dict[str, str], own: dict[str, str], changes: Environment
) -> dict[str, str]:
    """The environment of the worker: the template's environment `here`, updated with the worker's
    variables for threads and devices (`own`), and then with `changes`. OMP_NUM_THREADS in `changes`
    applies to every BLAS whose own variable is not in `changes`."""
    found = {**here, **own}
    named = dict(changes)
    if EVERY_BLAS in named:
        changes = (*((name, named[EVERY_BLAS]) for name in BLAS_VARIABLES), *changes)
    for name, value in changes:
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def exec_interpreter(
    start: Start, request: Spawn, rpc_fd: int, inherited: list[int], own: dict[str, str]
) -> NoReturn:
    """Executes the interpreter. Called in the forked child."""
    arguments = _Arguments(
        start.control_fd,
        start.store_fd,
        start.event_fd,
        rpc_fd,
        request.slot,
        request.pool,
        request.max_tasks,
        request.setup,
        request.output_owner,
        f"worker {request.slot}@h",
        start.config,
        start.inherited_settings,
        inherited,
    )
    listed = json.dumps(sys.path).encode()
    info = os.memfd_create("hoplite_mp start", 0)  # without O_CLOEXEC, to survive the exec
    os.write(info, len(listed).to_bytes(8, "little") + listed + msgspec.msgpack.encode(arguments))
    os.lseek(info, 0, os.SEEK_SET)
    for fd in (start.control_fd, start.store_fd, start.event_fd, rpc_fd, *inherited):
        os.set_inheritable(fd, True)
    boot = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot.py")
    import subprocess  # imported here, because other workers do not need it

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execve(
        sys.executable,
        [sys.executable, *flags, boot, str(info), "worker"],
        environment_of(dict(os.environ), own, request.env),
    )


def begin(body: bytearray) -> None:
    """Runs the worker. Called in the new interpreter."""
    arguments = msgspec.msgpack.decode(body, type=_Arguments)
    for fd in (arguments.control_fd, arguments.store_fd, arguments.event_fd, arguments.rpc_fd):
        os.set_inheritable(fd, False)
    for fd in arguments.inherited:
        os.set_inheritable(fd, False)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"hoplite worker", 0, 0, 0)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.enable()
    code = 1
    try:
        module, main_of = WORKER_MAIN
        entry = getattr(importlib.import_module(module), main_of)
        code = entry(*msgspec.structs.astuple(arguments))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        leave(code or 0)
