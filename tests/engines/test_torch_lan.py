"""torch over emulated hosts: tensors that are fetched, the process group, and a host that dies."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.lan import Lan, why_not
from tests.support.clusters import UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.long
SIZE = 3
PATIENCE_S = 100


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    if reason := why_not():
        pytest.skip(f"no emulated hosts: {reason}")
    with Lan(SIZE) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(lan: Lan) -> Iterator[UpCluster]:
    made = UpCluster(lan, tls=False, workers=1)
    yield made
    assert made.end() == [0] * SIZE


def members(cluster: UpCluster, lan: Lan, program: str) -> list[Any]:
    """The program as a driver on each host, with `c`, `rank`, `size`; what each prints as JSON."""
    running = []
    for rank, host in enumerate(lan):
        source = (
            f"import os, sys, json, time, torch, hoplite_mp\nrank, size = {rank}, {SIZE}\n"
            "torch.set_num_threads(1)\n"
            f"with hoplite_mp.Cluster(address={cluster.address!r}, tls=False) as c:\n"
            + textwrap.indent(textwrap.dedent(program), "    ")
        )
        running.append(
            host.popen(
                [sys.executable, "-c", source],
                env=cluster.env,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return [json.loads(one.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]) for one in running]


def test_tensors_are_fetched_from_other_hosts(cluster: UpCluster, lan: Lan) -> None:
    found = members(
        cluster,
        lan,
        """
        def work(x):
            x = x + 1
            return {"host": os.uname().nodename, "made": x.to(torch.bfloat16)}
        x = torch.arange(1 << 20, dtype=torch.float32)
        tasks = [c.options(node=node).submit(work, c.put(x)) for node in c.nodes]
        results = [task.result(60) for task in tasks]
        right = (x + 1).to(torch.bfloat16)
        print(json.dumps([len({one["host"] for one in results}),
                          all(torch.equal(one["made"], right) for one in results)]))
        """,
    )
    assert found == [[SIZE, True]] * SIZE


def test_the_process_group(cluster: UpCluster, lan: Lan) -> None:
    found = members(
        cluster,
        lan,
        f"""
        import torch.distributed as dist, hoplite_mp.integrations.torch
        dist.init_process_group("hoplite", init_method="tcp://{lan[0].address}:7500",
                                rank=rank, world_size=size)
        said = []
        for n in (3, 300_000):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.full((n,), rank + 1.0, dtype=dtype)
                works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)]
                [work.wait() for work in works]
                said.append([x.min().item(), x.max().item()])
            outs = [torch.zeros(n) for _ in range(size)]
            dist.all_gather(outs, torch.full((n,), float(rank)))
            said.append([out.sum().item() / n for out in outs])
            part = torch.empty(n)
            dist.reduce_scatter_tensor(part, torch.arange(size).repeat_interleave(n).float())
            said.append([part.min().item(), part.max().item()])
            dist.send(x, (rank + 1) % size)
            dist.recv(x, (rank - 1) % size)
        dist.barrier()
        dist.destroy_process_group()
        print(json.dumps(said))
        """,
    )
    for rank, said in enumerate(found):
        part = [3.0 * rank] * 2
        assert said == [[18.0, 18.0], [18.0, 18.0], [0.0, 1.0, 2.0], part] * 2
