"""Checks of CPUs, limits on open files and processes, memory and disk.

A shortage becomes visible late, and looks like another problem: workers that compete for cores, a
slow network, an extra worker that cannot be started.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hoplite_mp._cli.doctor.findings import limits, ok, problem, warning
from hoplite_mp._client.launch import store_size
from hoplite_mp._common.machine_limits import (
    available_bytes,
    cgroup_limit,
    cpu_count,
    cpu_quota,
    format_bytes,
    processes_left,
    total_bytes,
)
from hoplite_mp._engine import crc32c
from hoplite_mp._node.io.spill_file import SpillFile, default_directory, is_tmpfs
from hoplite_mp._supervisor.environment import BLAS_VARIABLES, blas_environment
from hoplite_mp._supervisor.processes import DESCRIPTORS_MAX
from hoplite_mp.config import MIB
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._cli.doctor.findings import Finding
    from hoplite_mp.config import Config

__all__ = ["CHECKS"]


PROC = Path("/proc")
PROCESSES_OF_HOST = 3  # supervisor, node, manager
THREADS_OF_NODE = 4  # excluding the threads for reductions
DESCRIPTORS_OF_NODE = 32  # excluding those for workers: 10, plus some for links to other nodes
DESCRIPTORS_OF_WORKER = 6  # both ends of a connection and of two pipes, while the worker starts
# Size and number of records that are processed to measure a rate. A TLS record has 16 KiB.
RECORD_BYTES, RECORDS = 16 << 10, 256
# Rates below these show that the code does not use special instructions. One core is then too slow
# for a fast link.
CRC_SLOW_BYTES_PER_S = 1.5e9
AES_SLOW_BYTES_PER_S = 0.5e9
# Flags in /proc/cpuinfo, and the library's use of these instructions.
INSTRUCTIONS = {
    "sse4_2": "checksums of network traffic",
    "aes": "TLS",
    "avx2": "reductions",
}


def _cpus() -> Iterator[Finding]:
    total, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota, workers = cpu_quota(), cpu_count()
    observed = f"{allowed} of {total} may be used"
    if quota < allowed:
        observed += f", with a quota of {quota:.3g} CPUs (control group)"
    observed += f": {workers} worker{'s' * (workers != 1)} by default"
    if quota < 1:
        advice = "give the container a whole CPU: node and workers wait for each other"
        yield warning("CPUs", observed, advice)
    elif workers == 1:
        advice = "tasks do not run in parallel; request more workers with workers="
        yield warning("CPUs", observed, advice)
    else:
        yield ok("CPUs", observed)


def _instructions() -> Iterator[Finding]:
    """Whether the CPU has the instructions for fast checksums, TLS and reductions. Checksums and
    TLS are also measured."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    record = bytes(RECORD_BYTES)
    checksum = _bytes_per_s(lambda: crc32c(record))
    cipher, nonce = AESGCM(bytes(16)), bytes(12)
    encryption = _bytes_per_s(lambda: cipher.encrypt(nonce, record, None))
    observed = f"checksums {checksum / 1e9:.1f} GB/s, TLS {encryption / 1e9:.1f} GB/s on one core"
    text = (PROC / "cpuinfo").read_text()
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.M)).split())
    lacking = [name for name in INSTRUCTIONS if name not in flags] if "sse2" in flags else []
    if lacking:
        observed += f"; this CPU lacks {', '.join(lacking)}"
        uses = ", ".join(INSTRUCTIONS[name] for name in lacking)
        yield warning("instructions", observed, f"slower: {uses}. A virtual machine may hide them")
    elif checksum < CRC_SLOW_BYTES_PER_S or encryption < AES_SLOW_BYTES_PER_S:
        advice = "the CPU limits faster links; on a trusted network, --no-tls helps"
        yield warning("instructions", observed, advice)
    else:
        yield ok("instructions", observed)


def _bytes_per_s(call: Callable[[], object]) -> float:
    """The highest rate in three runs, because other activity can only slow a run down."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(RECORDS):
            call()
        times.append(time.perf_counter() - began)
    return RECORDS * RECORD_BYTES / min(times)


def _blas() -> Iterator[Finding]:
    """The number of threads that numerical libraries use in a worker of a pool with one process
    for each CPU, as set by the supervisor."""
    cpus = cpu_count()
    given = {name: os.environ[name] for name in BLAS_VARIABLES if os.environ.get(name)}
    chosen = limits().blas_threads
    if chosen is not None:
        source = f"HOPLITE_MP_BLAS_THREADS={chosen}"
    else:
        source = ", ".join(f"{name}={value}" for name, value in given.items())
    decided = blas_environment(chosen, cpus, cpus, given)
    firsts = [decided[name].split(",")[0].strip() for name in BLAS_VARIABLES]
    threads = max((int(text) for text in firsts if text.isdecimal()), default=1)
    if threads > 1:
        yield warning(
            "BLAS threads",
            f"{threads} in each process ({source}): {cpus} workers with {threads * cpus} threads "
            f"compete for {cpus} CPUs",
            "unset the variable, or start fewer workers",
        )
    elif source:
        yield ok("BLAS threads", f"{threads} in each process ({source})")
    else:
        observed = f"{cpus} CPUs / processes of a pool, at least 1, and 1 in an actor"
        yield ok("BLAS threads", observed)


def _descriptors() -> Iterator[Finding]:
    """The limit on open files (RLIMIT_NOFILE). Only the hard limit matters, because the supervisor
    raises the soft limit."""
    config, workers = limits(), cpu_count()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    have = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    need = DESCRIPTORS_OF_NODE + DESCRIPTORS_OF_WORKER * workers
    most = need + DESCRIPTORS_OF_WORKER * config.blocked_workers_max
    observed = f"a process may open {have} files"
    if have < need:
        advice = f"ulimit -Hn {most}: {workers} workers need {need}"
        yield problem("open files", observed, advice)
    elif have < most:
        advice = f"ulimit -Hn {most}, or lower HOPLITE_MP_BLOCKED_WORKERS_MAX"
        observed += (
            f"; {workers} workers and {config.blocked_workers_max} extra workers need {most}"
        )
        yield warning("open files", observed, advice)
    else:
        yield ok("open files", observed)


def _processes() -> Iterator[Finding]:
    """The limits on processes: RLIMIT_NPROC, which does not apply to root, and the limit in the
    pids control group."""
    config, workers = limits(), cpu_count()
    left, limit = processes_left()
    need = workers + PROCESSES_OF_HOST + THREADS_OF_NODE + (config.reduce_threads or workers)
    most = need + config.blocked_workers_max
    if left >= 1 << 59:
        yield ok("processes", "unlimited")
        return
    observed = f"{left} more processes and threads are allowed ({limit})"
    if left < need:
        yield problem("processes", observed, f"raise the limit: {workers} workers need {need}")
    elif left < most:
        observed += (
            f"; {workers} workers and {config.blocked_workers_max} extra workers need {most}"
        )
        yield warning(
            "processes", observed, "raise the limit, or lower HOPLITE_MP_BLOCKED_WORKERS_MAX"
        )
    else:
        yield ok("processes", observed)


# -- memory, and the disk for spilled objects ----------------------------------------------------
#
# If the store may grow beyond the free memory, calls to `put` may wait, spill or fail.


STORE_SMALL_BYTES = 64 * MIB  # spans of small objects take a large part of a smaller store
WRITTEN = b"hoplite_mp doctor"


def _store_bytes(config: Config) -> int:
    try:
        return store_size(config.memory_bytes)[0]
    except ConfigError:  # reported by the check of the address space
        return config.memory_bytes or total_bytes() // 3


def _memory() -> Iterator[Finding]:
    """The store's limit, compared with the host's total and free memory."""
    config = limits()
    store, total, free = _store_bytes(config), total_bytes(), available_bytes()
    reserve = min(config.memory_reserve_bytes, total // 8)
    source = "HOPLITE_MP_MEMORY_BYTES" if config.memory_bytes else "a third"
    if not config.memory_bytes and store < total // 3:
        source = "limited by ulimit"
    observed = f"{format_bytes(psutil.virtual_memory().total)} of RAM"
    if cgroup_limit() < psutil.virtual_memory().total:
        observed += f", {format_bytes(cgroup_limit())} for this control group"
    observed += f", {format_bytes(free)} free; the store may take {format_bytes(store)} ({source})"
    if store > total:
        yield problem("memory", observed, f"memory= must be less than {format_bytes(total)}")
    elif free <= reserve:
        advice = f"stop other programs: {format_bytes(reserve)} must stay free (memory_reserve)"
        yield problem("memory", observed, advice)
    elif store > free - reserve:
        advice = (
            f"beyond {format_bytes(max(0, free - reserve))}, `put` waits or spills; give memory= a "
            "smaller size, or stop other programs"
        )
        yield warning("memory", observed, advice)
    elif store < STORE_SMALL_BYTES:
        yield warning("memory", observed, "the store is small: give memory= a larger size")
    else:
        yield ok("memory", observed)


def _spilling() -> Iterator[Finding]:
    """Whether the directory for spilled objects is writable and on a disk with enough space."""
    config = limits()
    if config.spill_bytes_max == 0:
        yield ok("spilling", "switched off (HOPLITE_MP_SPILL_BYTES_MAX=0)")
        return
    folder = config.spill_dir or default_directory()
    if folder is None:
        observed = "none of TMPDIR, /var/tmp and the working directory is writable and on a disk"
        yield warning(
            "spilling", observed, "`put` fails when the store is full; set HOPLITE_MP_SPILL_DIR"
        )
        return
    if not os.path.isdir(folder):
        yield problem("spilling", f"{folder} is not a directory", "create it, or set spill_dir=")
        return
    try:
        _write_and_read(folder)
    except OSError as error:
        observed = f"cannot write a file in {folder}: {error.strerror or error}"
        yield problem("spilling", observed, "make it writable, or set spill_dir=")
        return
    free = shutil.disk_usage(folder).free
    space = free if config.spill_bytes_max is None else min(free, config.spill_bytes_max)
    observed = f"{format_bytes(space)} in {Path(folder)}"
    if is_tmpfs(folder):
        observed += ", which is in memory (tmpfs)"
        yield warning("spilling", observed, "set spill_dir= to a directory on a disk")
    elif space < _store_bytes(config):
        advice = "less than the size of the store: free some space, or set spill_dir="
        yield warning("spilling", observed, advice)
    else:
        yield ok("spilling", observed)


def _write_and_read(folder: str) -> None:
    """Writes and reads a file without a name, as the node does."""
    file = SpillFile(folder, None)
    try:
        place = file.write(memoryview(WRITTEN))
        assert place is not None
        back = bytearray(len(WRITTEN))
        file.read(place, memoryview(back))
        if back != WRITTEN:
            raise OSError("the bytes read differ from those written")
    finally:
        file.close()


CHECKS = (_cpus, _instructions, _blas, _descriptors, _processes, _memory, _spilling)
