"""Checks of the software and kernel that are required to start a host."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import resource
import select
import socket
from typing import TYPE_CHECKING

from hoplite_mp._cli.doctor.findings import limits, ok, problem
from hoplite_mp._client.launch import store_size
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._protocol.greetings import software_versions
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._cli.doctor.findings import Finding

__all__ = ["CHECKS"]

DISTRIBUTION = "hoplite-mp"
KERNEL_MIN = "5.3"  # the first version with pidfd_open


def _software() -> Iterator[Finding]:
    """The software versions, compared with the requirements of the installed package."""
    versions = software_versions()
    kind = platform.python_implementation()
    observed = ", ".join(f"{name} {version}" for name, version in versions.items())
    if kind != "CPython":
        yield problem("software", f"{kind}: {observed}", "only CPython is supported")
    too_old = []
    for name, least in _required():
        have = importlib.metadata.version(name)
        if _numbers(have) < _numbers(least):
            too_old.append(f"{name} {have} (at least {least})")
    if too_old:
        yield problem("software", f"too old: {', '.join(too_old)}", "pip install -U hoplite-mp")
    elif kind == "CPython":
        yield ok("software", observed)


def _required() -> list[tuple[str, str]]:
    """(name, minimum version) for each package that the distribution always requires."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # not installed: a checkout
        return []
    found = [re.fullmatch(r"([\w.-]+)\s*>=\s*([\d.]+)", text) for text in wanted]
    return [(match[1], match[2]) for match in found if match]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _kernel() -> Iterator[Finding]:
    """Tries each of the required system calls."""

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
        yield problem(
            "kernel",
            f"Linux {release} does not allow {', '.join(missing)}",
            f"Linux {KERNEL_MIN} or newer is needed; a container's seccomp profile must allow them",
        )
    else:
        yield ok("kernel", f"Linux {release} has {', '.join(calls)}")


def _address_space() -> Iterator[Finding]:
    """Creates and maps a sparse file of the store's size, and writes to it, as the store does."""
    try:
        _, length = store_size(limits().memory_bytes)
    except ConfigError as error:
        advice = "raise the limit, or lower HOPLITE_MP_MEMORY_BYTES"
        yield problem("address space", str(error), advice)
        return
    fd = os.memfd_create("hoplite_mp doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length)
        with mmap.mmap(fd, length) as mapped:
            mapped[length - 1] = 1
    except (OSError, ValueError) as error:
        found = [
            f"{name} {format_bytes(soft)}"
            for name, kind in (("-v", resource.RLIMIT_AS), ("-f", resource.RLIMIT_FSIZE))
            if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
        ]
        yield problem(
            "address space",
            f"{format_bytes(length)} cannot be mapped: {error}",
            f"raise ulimit {', '.join(found)}" if found else "allow sparse memfds",
        )
    else:
        yield ok("address space", f"{format_bytes(length)} can be mapped (this uses no memory)")
    finally:
        os.close(fd)


CHECKS = (_software, _kernel, _address_space)
