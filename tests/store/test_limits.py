"""What a process may use, read from made-up /proc and control group trees of both versions."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common import machine_limits

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"


class Tree:
    """Files below a folder that stands for the root of the system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: Any) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def group(self, path: str, **files: Any) -> None:
        for name, value in files.items():
            self.write(f"cgroup/{path}/{name.replace('__', '.')}", value)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path)
    made.write("proc/meminfo", MEMINFO)
    monkeypatch.setattr(machine_limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine_limits, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return made


def test_without_control_groups_it_is_the_ram(tree: Tree) -> None:
    assert machine_limits.total_bytes() == 16 * GIB
    assert machine_limits.available_bytes() == 8 * GIB
    assert machine_limits.cpu_count() == 16


def test_without_mem_available_nothing_is_made_up(tree: Tree) -> None:
    tree.write("proc/meminfo", "MemTotal: 1024 kB")
    assert machine_limits.total_bytes() == 1 << 20
    assert machine_limits.available_bytes() == machine_limits.UNLIMITED


def test_version_2_own_group(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/b")
    tree.group("a/b", memory__max=4 * GIB, memory__current=GIB)
    assert machine_limits.cgroup_limit() == machine_limits.total_bytes() == 4 * GIB
    assert machine_limits.available_bytes() == 3 * GIB


def test_version_2_a_group_above_is_tighter(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/b")
    tree.group("a/b", memory__max="max", memory__current=GIB)
    tree.group("a", memory__max=2 * GIB, memory__current=GIB + GIB // 2)
    assert machine_limits.cgroup_limit() == 2 * GIB
    assert machine_limits.cgroup_headroom() == GIB // 2


def test_version_2_headroom_is_the_least_of_all_levels(tree: Tree) -> None:
    """The smallest limit is not always the one that is reached first."""
    tree.write("proc/self/cgroup", "0::/a/b")
    tree.group("a/b", memory__max=2 * GIB, memory__current=GIB)
    tree.group("a", memory__max=4 * GIB, memory__current=4 * GIB - 4096)
    assert machine_limits.cgroup_limit() == 2 * GIB
    assert machine_limits.cgroup_headroom() == 4096


def test_version_2_page_cache_can_be_dropped(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a")
    tree.group(
        "a",
        memory__max=2 * GIB,
        memory__current=2 * GIB,
        memory__stat=f"anon 1\nfile 5\ninactive_file {GIB}\nactive_file 9",
    )
    assert machine_limits.cgroup_headroom() == GIB


def test_usage_above_the_limit_leaves_nothing(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a")
    tree.group("a", memory__max=GIB, memory__current=2 * GIB)
    assert machine_limits.cgroup_headroom() == machine_limits.available_bytes() == 0


def test_version_1(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "9:name=systemd:/x\n4:memory:/a/b\n3:cpu,cpuacct:/a")
    unlimited = 0x7FFFFFFFFFFFF000
    tree.group("memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=5 * GIB)
    tree.group("memory/a", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    tree.group("memory/a/b", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=GIB)
    assert machine_limits.cgroup_limit() == 3 * GIB
    assert machine_limits.cgroup_headroom() == 2 * GIB


def test_version_1_counts_the_page_cache_of_inner_groups_too(tree: Tree) -> None:
    """Its usage is that of the whole subtree, so what can be dropped must be so as well."""
    tree.write("proc/self/cgroup", "4:memory:/a")
    tree.group(
        "memory/a",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat=f"cache 7\ninactive_file 4096\ntotal_inactive_file {GIB}",
    )
    assert machine_limits.cgroup_headroom() == GIB


def test_hybrid_the_controller_is_of_version_1(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/a\n0::/u")
    tree.group("memory/a", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    tree.group("unified/u", cgroup__procs="1")
    assert machine_limits.total_bytes() == 3 * GIB


def test_a_container_sees_its_own_group_as_the_root(tree: Tree) -> None:
    """The path is that of the host and is not there; the root's files are the container's."""
    tree.write("proc/self/cgroup", "0::/docker/abc")
    tree.group(".", memory__max=GIB, memory__current=GIB // 4)
    assert machine_limits.total_bytes() == GIB
    assert machine_limits.available_bytes() == GIB - GIB // 4


@pytest.mark.parametrize("text", ["", "nonsense", "-"])
def test_what_cannot_be_read_limits_nothing(tree: Tree, text: str) -> None:
    tree.write("proc/self/cgroup", "0::/a\n")
    tree.group("a", memory__max=text, memory__current=text, memory__stat="inactive_file x")
    assert machine_limits.total_bytes() == 16 * GIB
    assert machine_limits.available_bytes() == 8 * GIB


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 16), ("350000 100000", 3), ("50000 100000", 1), ("9900000 100000", 16)],
)
def test_cpus_version_2_of_any_level(tree: Tree, quota: str, cpus: int) -> None:
    tree.write("proc/self/cgroup", "0::/a/b")
    tree.group("a/b", cpu__max="max 100000")
    tree.group("a", cpu__max=quota)
    assert machine_limits.cpu_count() == cpus


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_cpus_version_1(tree: Tree, mount: str) -> None:
    tree.write("proc/self/cgroup", "3:cpu,cpuacct:/a/b\n4:memory:/")
    tree.group(mount, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    tree.group(f"{mount}/a", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    tree.group(f"{mount}/a/b", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine_limits.cpu_count() == 2


def test_this_host_is_read_without_complaint() -> None:
    assert 0 < machine_limits.available_bytes() <= machine_limits.UNLIMITED
    assert (1 << 20) < machine_limits.total_bytes() < (1 << 50)
    assert machine_limits.cpu_count() >= 1


def test_a_part_of_a_cpu_is_said_as_it_is(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/b")
    tree.group("a/b", cpu__max="max 100000")
    assert machine_limits.cpu_quota() == float("inf")
    tree.group("a", cpu__max="50000 100000")
    assert machine_limits.cpu_quota() == 0.5
    assert machine_limits.cpu_count() == 1


@pytest.mark.parametrize("version", [1, 2])
def test_processes_of_the_tightest_group(tree: Tree, version: int) -> None:
    tree.write("proc/self/cgroup", "0::/a/b" if version == 2 else "8:pids:/a/b")
    assert machine_limits.pids_headroom() == machine_limits.UNLIMITED
    root = "" if version == 2 else "pids/"
    tree.group(f"{root}a/b", pids__max="max", pids__current=7)
    assert machine_limits.pids_headroom() == machine_limits.UNLIMITED
    tree.group(f"{root}a", pids__max=100, pids__current=40)
    assert machine_limits.pids_headroom() == 60
    tree.group(f"{root}a/b", pids__max=5, pids__current=7)
    assert machine_limits.pids_headroom() == 0


def test_processes_left_of_a_user_count_what_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    user = 4000
    monkeypatch.setattr(machine_limits.resource, "getrlimit", lambda _: (107, 107))
    monkeypatch.setattr(machine_limits, "pids_headroom", lambda: machine_limits.UNLIMITED)
    assert machine_limits._threads_of(os.getuid()) >= threading.active_count()
    monkeypatch.setattr(machine_limits, "_threads_of", {user: 100}.get)
    monkeypatch.setattr(machine_limits, "_is_privileged", lambda: False)
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert machine_limits.processes_left() == (7, "ulimit -u")
    monkeypatch.setattr(machine_limits, "pids_headroom", lambda: 3)
    assert machine_limits.processes_left() == (3, "control group")
    monkeypatch.setattr(machine_limits, "_is_privileged", lambda: True)
    monkeypatch.setattr(machine_limits, "pids_headroom", lambda: machine_limits.UNLIMITED)
    assert machine_limits.processes_left()[0] == machine_limits.UNLIMITED
    monkeypatch.setattr(os, "getuid", lambda: 0)  # the limit does not bind root
    monkeypatch.setattr(machine_limits, "_is_privileged", lambda: False)
    assert machine_limits.processes_left()[0] == machine_limits.UNLIMITED
