"""Checks of software, kernel, CPUs and process limits of this host.

Why it exists: what is missing here shows elsewhere as something else: as a host that does not
start, as workers that fight for cores, as a StoreFullError.
It must never know: memory, disks, other hosts.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import resource
import select
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hoplite_mp._engine import crc32c
from hoplite_mp.client.launch import STORE_BYTES_MIN, STORE_FACTOR
from hoplite_mp.client.memory import format_bytes
from hoplite_mp.config import Config
from hoplite_mp.doctor.findings import ok, problem, warning
from hoplite_mp.store.limits import cpu_count, cpu_quota, pids_headroom, total_bytes
from hoplite_mp.supervisor.main import BLAS_VARIABLES, DESCRIPTORS_MAX
from hoplite_mp.transport.tokens import FILE_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.doctor.findings import Finding

__all__ = ["CHECKS"]

PROC = Path("/proc")
DISTRIBUTION = "hoplite-mp"
PROCESSES_BESIDE = 3  # the workers: supervisor, node, manager
THREADS_OF_NODE = 4  # beside one for each core that reduces
DESCRIPTORS_BESIDE = 64  # of the node, beside those of its workers; measured: 10 and a few links
DESCRIPTORS_OF_WORKER = 6  # a line and two pipes, both ends while it starts
KERNEL_MIN = (5, 3)  # the first with pidfd_open
# Long enough to be measured, short enough not to be noticed. A TLS record has 16 KiB.
RECORD_BYTES, RECORDS = 16 << 10, 256
# What a slow way of doing it reaches at most: below it a fast link is limited by one core.
CRC_SLOW_BYTES_PER_S = 1.5e9
AES_SLOW_BYTES_PER_S = 0.5e9
# What is read in /proc/cpuinfo, and what it is for.
INSTRUCTIONS = {
    "sse4_2": "checksums of what comes over the network",
    "aes": "TLS",
    "avx2": "reductions",
}


def _software() -> Iterator[Finding]:
    """Versions, beside what the installed package asks for."""
    from hoplite_mp.protocol.versions import software_versions

    versions = software_versions()
    kind = platform.python_implementation()
    seen = ", ".join(f"{name} {version}" for name, version in versions.items())
    if kind != "CPython":
        yield problem("software", f"{kind}: {seen}", "only CPython is supported")
    too_old = []
    for name, least in _required():
        have = importlib.metadata.version(name)
        if _numbers(have) < _numbers(least):
            too_old.append(f"{name} {have} (at least {least})")
    if too_old:
        yield problem("software", f"too old: {', '.join(too_old)}", "pip install -U hoplite-mp")
    elif kind == "CPython":
        yield ok("software", seen)


def _required() -> list[tuple[str, str]]:
    """(package, least version) of what is always needed, by the installed package's own word."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return []
    found = [re.fullmatch(r"([\w.-]+)\s*>=\s*([\d.]+)", text) for text in wanted]
    return [(match[1], match[2]) for match in found if match]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _settings() -> Iterator[Finding]:
    """Variables that are read, whether they can be, and those that look as if they were."""
    import dataclasses

    fields = {f"HOPLITE_MP_{field.name.upper()}" for field in dataclasses.fields(Config)}
    secret = {VARIABLE}
    known = fields | secret | {FILE_VARIABLE}
    found = sorted(name for name in os.environ if name.startswith("HOPLITE_MP_"))
    for name in found:
        if name not in known:
            seen = f"{name} is set, and nobody reads it"
            yield warning("settings", seen, "the fields of hoplite_mp.Config are what can be set")
    try:
        Config.from_environment()
    except ValueError as error:  # ConfigError is one
        yield problem("settings", str(error), "correct the variable, or unset it")
        return
    shown = [f"{name}={os.environ[name]}" for name in found if name in known - secret]
    yield ok("settings", ", ".join(shown) or "no limit is set in the environment")


def _kernel() -> Iterator[Finding]:
    """The calls without which no host starts, each of them made."""

    def shared_file() -> None:
        os.close(os.memfd_create("hoplite_mp doctor", os.MFD_CLOEXEC))

    def process_descriptor() -> None:
        os.close(os.pidfd_open(os.getpid()))

    def event() -> None:
        os.close(os.eventfd(0, os.EFD_CLOEXEC))

    def epoll() -> None:
        select.epoll().close()

    def packets() -> None:
        for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
            end.close()

    calls: dict[str, Callable[[], None]] = {
        "memfd_create": shared_file,
        "pidfd_open": process_descriptor,
        "eventfd": event,
        "epoll": epoll,
        "SOCK_SEQPACKET": packets,
    }
    release = platform.release()
    missing = []
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            missing.append(f"{name}: {error.strerror}")
    if missing:
        least = ".".join(map(str, KERNEL_MIN))
        yield problem(
            "kernel",
            f"Linux {release} does not allow {', '.join(missing)}",
            f"Linux {least} or newer is needed; in a container, its seccomp profile must allow it",
        )
    else:
        yield ok("kernel", f"Linux {release} has {', '.join(calls)}")


def _address_space() -> Iterator[Finding]:
    """The store is one sparse file, mapped whole; so it is made, mapped and written to here."""
    length = max(STORE_BYTES_MIN, STORE_FACTOR * (total_bytes() // 3))
    fd = os.memfd_create("hoplite_mp doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length)
        with mmap.mmap(fd, length) as mapped:
            mapped[length - 1] = 1
    except (OSError, ValueError) as error:
        limits = [
            f"{name} {format_bytes(soft)}"
            for name, kind in (("-v", resource.RLIMIT_AS), ("-f", resource.RLIMIT_FSIZE))
            if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
        ]
        yield problem(
            "address space",
            f"{format_bytes(length)} of it cannot be mapped: {error}",
            f"lift ulimit {', '.join(limits)}" if limits else "allow sparse memory files",
        )
    else:
        yield ok("address space", f"{format_bytes(length)} can be mapped (it costs no memory)")
    finally:
        os.close(fd)


def _cpus() -> Iterator[Finding]:
    there, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota, workers = cpu_quota(), cpu_count()
    seen = f"{allowed} of {there} may be used"
    if quota < allowed:
        seen += f", for the time of {quota:.3g} (control group)"
    seen += f": {workers} worker{'s' * (workers != 1)} if nothing else is said"
    if quota < 1:
        advice = "give the container a whole CPU: node and workers wait for each other now"
        yield warning("CPUs", seen, advice)
    elif workers == 1:
        yield warning("CPUs", seen, "nothing runs in parallel here; workers= may ask for more")
    else:
        yield ok("CPUs", seen)


def _instructions() -> Iterator[Finding]:
    """What makes checksums, TLS and reductions fast; the first two are measured as well."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    record = bytes(RECORD_BYTES)
    checksum = _bytes_per_s(lambda: crc32c(record))
    cipher, nonce = AESGCM(bytes(16)), bytes(12)
    encryption = _bytes_per_s(lambda: cipher.encrypt(nonce, record, None))
    seen = f"checksums {checksum / 1e9:.1f} GB/s, TLS {encryption / 1e9:.1f} GB/s on one core"
    text = (PROC / "cpuinfo").read_text()
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.M)).split())
    lacking = [name for name in INSTRUCTIONS if name not in flags] if "sse2" in flags else []
    if lacking:
        seen += f"; this CPU does not show {', '.join(lacking)}"
        uses = ", ".join(INSTRUCTIONS[name] for name in lacking)
        yield warning("instructions", seen, f"slower: {uses}. A virtual machine may hide them")
    elif checksum < CRC_SLOW_BYTES_PER_S or encryption < AES_SLOW_BYTES_PER_S:
        advice = "a link faster than that waits for the CPU; on a trusted network, --no-tls helps"
        yield warning("instructions", seen, advice)
    else:
        yield ok("instructions", seen)


def _bytes_per_s(call: Callable[[], object]) -> float:
    """The best of three: what comes between makes it slower only."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(RECORDS):
            call()
        times.append(time.perf_counter() - began)
    return RECORDS * RECORD_BYTES / min(times)


def _blas() -> Iterator[Finding]:
    """Threads of BLAS in each worker times workers, against CPUs."""
    cpus = cpu_count()
    given = {name: os.environ[name] for name in BLAS_VARIABLES if os.environ.get(name)}
    config = Config.from_environment()
    if config.blas_threads is not None:
        threads, source = config.blas_threads, "HOPLITE_MP_BLAS_THREADS"
    else:
        numbers = [int(text) for text in given.values() if text.isdecimal()]
        threads, source = max(numbers, default=1), ", ".join(f"{k}={v}" for k, v in given.items())
    if threads > 1:
        yield warning(
            "BLAS threads",
            f"{threads} in each worker ({source}): with {cpus} workers {threads * cpus} threads "
            f"fight for {cpus} CPUs",
            "unset it, or start fewer workers",
        )
    else:
        yield ok("BLAS threads", f"{threads} in each worker" + (f" ({source})" if source else ""))


def _descriptors() -> Iterator[Finding]:
    """RLIMIT_NOFILE; the supervisor raises the soft limit by itself."""
    config, workers = Config.from_environment(), cpu_count()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    have = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    need = DESCRIPTORS_BESIDE + DESCRIPTORS_OF_WORKER * workers
    most = need + DESCRIPTORS_OF_WORKER * config.blocked_workers_max
    seen = f"a process may open {have} files"
    if have < need:
        advice = f"ulimit -Hn {most}: {workers} workers need {need}"
        yield problem("open files", seen, advice)
    elif have < most:
        advice = f"ulimit -Hn {most}, or lower HOPLITE_MP_BLOCKED_WORKERS_MAX"
        seen += f"; {workers} workers and {config.blocked_workers_max} stand-ins need {most}"
        yield warning("open files", seen, advice)
    else:
        yield ok("open files", seen)


def _processes() -> Iterator[Finding]:
    """RLIMIT_NPROC (which binds nobody who is root) and the control group of pids."""
    config, workers = Config.from_environment(), cpu_count()
    room, why = pids_headroom(), "control group"
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        left = max(0, soft - _own_threads())
        room, why = min((room, why), (left, "ulimit -u"))
    need = workers + PROCESSES_BESIDE + THREADS_OF_NODE + (config.reduce_threads or workers)
    most = need + config.blocked_workers_max
    if room >= 1 << 59:
        yield ok("processes", "their number is not limited")
        return
    seen = f"{room} more processes and threads are allowed ({why})"
    if room < need:
        yield problem("processes", seen, f"raise the limit: {workers} workers need {need}")
    elif room < most:
        seen += f"; {workers} workers and {config.blocked_workers_max} stand-ins need {most}"
        yield warning("processes", seen, "raise it, or lower HOPLITE_MP_BLOCKED_WORKERS_MAX")
    else:
        yield ok("processes", seen)


def _own_threads() -> int:
    """Threads of all processes of this user, which is what RLIMIT_NPROC counts."""
    user, count = os.getuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == user:
            count += process.info["num_threads"] or 1
    return count


CHECKS = (
    _software,
    _settings,
    _kernel,
    _address_space,
    _cpus,
    _instructions,
    _blas,
    _descriptors,
    _processes,
)
