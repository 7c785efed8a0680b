"""This process's resource limits (RAM, CPUs, cgroups, ulimit), and the formats for byte counts and
times in messages.

A memfd has no size limit, so a store that grew too large would trigger the kernel's out-of-memory
killer. Therefore the node checks these limits before the store grows. Both versions of cgroups are
read, from the process's group up to the root, because the limits at all levels apply.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = [
    "address_space_left",
    "available_bytes",
    "cgroup_headroom",
    "cgroup_limit",
    "cpu_count",
    "cpu_quota",
    "file_size_limit",
    "format_bytes",
    "format_seconds",
    "pids_headroom",
    "processes_left",
    "three_digits",
    "total_bytes",
]

UNLIMITED = 1 << 60
PRIVILEGES = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def _meminfo(field: str) -> int:
    """A field of /proc/meminfo in bytes; UNLIMITED if it cannot be read."""
    try:
        text = (PROC / "meminfo").read_text()
    except OSError:
        return UNLIMITED
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return UNLIMITED


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if text == "max":
        return UNLIMITED
    try:
        return min(int(text), UNLIMITED)
    except ValueError:
        return None


def _levels(root: Path, inner: str) -> list[Path]:
    """The folders of a group and its visible ancestors."""
    levels = []
    path = Path(inner.lstrip("/"))
    while True:
        levels.append(root / path)
        if path == Path():
            return levels
        path = path.parent


def _folders(controller: str) -> tuple[list[Path], list[Path]]:
    """The folders of all enclosing groups for a controller: (version 1, version 2)."""
    first: list[Path] = []
    second: list[Path] = []
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return [], []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, inner = rest.partition(":")
        if number == "0" and not controllers:
            for root in (CGROUP, CGROUP / "unified"):
                second += _levels(root, inner)
        elif controller in controllers.split(","):
            # "cpu,cpuacct" is one mount; "cpu" is often a symbolic link to it
            for mount in (controllers, controller):
                if (CGROUP / mount).is_dir():
                    first += _levels(CGROUP / mount, inner)
                    break
    return first, second


def _groups() -> list[tuple[Path, str, str]]:
    """(folder, limit file, usage file) for each enclosing memory group, v1 and v2."""
    first, second = _folders("memory")
    return [(p, "memory.limit_in_bytes", "memory.usage_in_bytes") for p in first] + [
        (p, "memory.max", "memory.current") for p in second
    ]


def cgroup_limit() -> int:
    """The smallest memory limit among the enclosing groups, in bytes; 2**60 if unlimited."""
    limits = [_read_int(folder / limit) for folder, limit, _ in _groups()]
    return min([x for x in limits if x is not None], default=UNLIMITED)


def cgroup_headroom() -> int:
    """The memory that the tightest enclosing group still allows, in bytes.

    Usage includes page cache that the kernel can drop. The part reported as `inactive_file` is
    added back. The returned number may be too low, because the rest of the cache is not added.
    """
    headroom = UNLIMITED
    for folder, limit_file, usage_file in _groups():
        limit, usage = _read_int(folder / limit_file), _read_int(folder / usage_file)
        if limit is None or usage is None or limit >= UNLIMITED // 2:
            continue
        headroom = min(headroom, limit - usage + _inactive_file(folder))
    return max(headroom, 0)


def _inactive_file(folder: Path) -> int:
    """The inactive page cache of the group and its descendants, in bytes. In version 1 this is
    `total_inactive_file`, and `inactive_file` is only for the group itself."""
    found: dict[str, int] = {}
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name.endswith("inactive_file"):
                found[name] = int(value)
    except (OSError, ValueError):
        return 0
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def total_bytes() -> int:
    """The smaller of RAM and the control group's limit, in bytes."""
    ram = _meminfo("MemTotal")
    if ram >= UNLIMITED:  # sysconf does not need /proc
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(ram, cgroup_limit())


def available_bytes() -> int:
    """The memory that can be allocated now, in bytes: the minimum of MemAvailable and the enclosing
    groups' headroom. Limits that cannot be read, for example because no descriptor is free, are
    ignored."""
    return min(_meminfo("MemAvailable"), cgroup_headroom())


def address_space_left() -> int:
    """The address space that this process may still use (ulimit -v), in bytes; 2**60 if unlimited.
    Without /proc, the address space in use counts as 0."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return UNLIMITED
    try:
        pages = int((PROC / "self" / "statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return max(0, soft - pages * resource.getpagesize())


def file_size_limit() -> int:
    """The largest file that this process may create (ulimit -f), in bytes; 2**60 if unlimited. The
    limit also applies to memfds."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def cpu_quota() -> float:
    """The CPU quota of the tightest enclosing cgroup, in CPUs; inf if unlimited."""
    quotas = [float("inf")]
    first, second = _folders("cpu")
    for folder in first:
        quota, period = (_read_int(folder / f"cpu.cfs_{x}_us") for x in ("quota", "period"))
        if quota and quota > 0 and period:
            quotas.append(quota / period)
    for folder in second:
        try:
            quota_text, period_text = (folder / "cpu.max").read_text().split()
            if quota_text != "max":
                quotas.append(int(quota_text) / int(period_text))
        except (OSError, ValueError):
            continue
    return min(quotas)


def cpu_count() -> int:
    """The number of CPUs that this process may use according to its affinity and the cgroup's
    quota."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def processes_left() -> tuple[int, str]:
    """(number of processes and threads that this user may still start, name of the limit); the
    number is 2**60 if unlimited. RLIMIT_NPROC does not apply to root or to processes with one of
    two capabilities. The user's processes are counted only if the limit applies, because counting
    takes a few milliseconds."""
    group = pids_headroom(), "control group"
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.getuid() == 0 or _is_privileged():
        return group
    return min(group, (max(0, soft - _threads_of(os.getuid())), "ulimit -u"))


def _is_privileged() -> bool:
    """Whether this process has CAP_SYS_ADMIN or CAP_SYS_RESOURCE."""
    found = _status(PROC / "self").get("CapEff", "0")
    return bool(int(found, 16) & PRIVILEGES)


def _threads_of(user: int) -> int:
    """The number of threads in all processes whose real user is `user`."""
    count = 0
    for folder in PROC.glob("[0-9]*"):
        status = _status(folder)
        if status.get("Uid", "").split("\t")[0] == str(user):
            count += int(status.get("Threads", "1"))
    return count


def _status(folder: Path) -> dict[str, str]:
    """The fields of a process's status file; {} if it cannot be read."""
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def pids_headroom() -> int:
    """The number of processes and threads that the tightest enclosing group still allows; 2**60 if
    unlimited."""
    headroom = UNLIMITED
    first, second = _folders("pids")
    for folder in first + second:
        limit, used = _read_int(folder / "pids.max"), _read_int(folder / "pids.current")
        if limit is not None and used is not None and limit < UNLIMITED:
            headroom = min(headroom, max(limit - used, 0))
    return headroom


def format_bytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if nbytes == int(nbytes) else f"{nbytes:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """0.0145 -> "14.5 ms"."""
    for name, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or name == "µs":
            return f"{three_digits(seconds * factor)} {name}"
    raise AssertionError


def three_digits(value: float) -> str:
    """Formats a number with three significant digits, or with all digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
