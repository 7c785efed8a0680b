"""Ranks that torchrun starts on one host, without a cluster, and without importing this library."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

import hoplite_mp
from hoplite_mp.integrations.torch._own_cluster import announce_cluster, open_cluster

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("hoplite" if sys.argv[1] == "ours" else "gloo")
rank = dist.get_rank()
total = torch.full((100_000,), float(rank + 1))
dist.all_reduce(total)
pair = dist.new_group([0, 1])
dist.broadcast(total, 1, group=pair)

from torch.distributed.fsdp import FullyShardedDataParallel

torch.manual_seed(0)
layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
model = FullyShardedDataParallel(torch.nn.Sequential(*layers), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.Generator().manual_seed(rank)
losses = []
for _ in range(4):
    x = torch.randn(8, 16, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(round(loss.item(), 4))
line = f"rank {rank} {total[0].item()} {losses} {'hoplite_mp' in sys.modules}"
print(line + "\\n", end="", flush=True)  # in one write
dist.destroy_process_group()
"""
PAIRS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), 0
for other in (1, 2):
    pair = dist.new_group([0, other], backend="hoplite")
    if rank in (0, other):
        one = torch.full((4,), other if rank else 0)
        dist.all_reduce(one, group=pair)
        total += int(one[0])
print(f"rank {rank}: {total}\\n", end="", flush=True)  # in one write
dist.destroy_process_group()
"""
CHAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), 0
for pair in GROUPS:
    group = dist.new_group(pair, backend="hoplite")
    if rank in pair:
        one = torch.ones(4)
        dist.all_reduce(one, group=group)
        total += int(one[0])
print(f"rank {rank}: {total}\\n", end="", flush=True)  # in one write
dist.destroy_process_group()
"""
LIGHT = """
import sys
import torch
from _hoplite_mp_torch import register
register()
loaded = [name for name in sys.modules if name.partition(".")[0] == "hoplite_mp"]
print("hoplite" in torch.distributed.Backend.backend_list, loaded)
"""
BROKEN = """
import sys, types
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
from _hoplite_mp_torch import register
register()
print("no exception")
"""


def torchrun(path: Path, which: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    done = subprocess.run([*command, which], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


@pytest.mark.long
def test_ranks_of_torchrun_compute_what_they_compute_over_gloo(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    ours, gloo = torchrun(program, "ours"), torchrun(program, "gloo")
    assert [line.rsplit(maxsplit=1)[0] for line in ours] == [
        line.rsplit(maxsplit=1)[0] for line in gloo
    ]
    assert [line.endswith("True") for line in ours] == [True, True]


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_entry_point_registers_the_backend_and_loads_no_engine() -> None:
    assert printed(LIGHT) == "True []"


def test_entry_point_that_fails_raises_nothing() -> None:
    assert printed(BROKEN) == "no exception"


def test_rank_without_cluster_beside_a_rank_0_that_has_one_is_refused_at_once() -> None:
    store = dist.HashStore()
    with hoplite_mp.Cluster(workers=0) as cluster:
        announce_cluster(store, cluster)
    with pytest.raises(hoplite_mp.ClosedError, match="rank 0 has one"):
        open_cluster(store, 1)


def test_rank_beside_a_rank_0_that_cannot_open_a_cluster_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("HOPLITE_MP_MEMORY_BYTES", "no number")
    with pytest.raises(hoplite_mp.ConfigError):
        open_cluster(store, 0)
    with pytest.raises(hoplite_mp.ClosedError, match="rank 0 could not open one"):
        open_cluster(store, 1)


def test_process_groups_with_rank_0_in_common_use_its_cluster(tmp_path: Path) -> None:
    program = tmp_path / "pairs.py"
    program.write_text(PAIRS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: 3", "rank 1: 1", "rank 2: 2"]


def chain(folder: Path, groups: str) -> subprocess.CompletedProcess[str]:
    program = folder / "chain.py"
    program.write_text(CHAIN.replace("GROUPS", groups))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_process_groups_that_overlap_use_one_cluster(tmp_path: Path) -> None:
    done = chain(tmp_path, "([0, 1], [1, 2], [2, 3])")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: 2", "rank 1: 4", "rank 2: 4", "rank 3: 2",
    ]  # fmt: skip


def test_process_group_of_ranks_in_different_clusters_fails_at_once(tmp_path: Path) -> None:
    done = chain(tmp_path, "([0, 1], [2, 3], [1, 2])")
    assert done.returncode != 0
    assert "are in different clusters" in done.stderr


ALONE = """
import torch
import torch.distributed as dist

dist.init_process_group("hoplite", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
dist.destroy_process_group()
print(x.tolist())
"""


def test_rank_without_a_cluster_opens_one_that_ends_with_it() -> None:
    assert printed(ALONE) == "[1.0, 1.0, 1.0]"
