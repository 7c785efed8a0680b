"""DistributedDataParallel whose ranks are killed, and come back."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hoplite_mp
from hoplite_mp.integrations.torch import DistributedDataParallel
from hoplite_mp.integrations.torch._data_parallel import StepMembership
from tests.engines.torch_training import DIES_AT, SIZE, Step, data_of, model_of, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster

STEPS = 40
PATIENCE_S = 110
ALL = tuple(range(SIZE))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=0) as c:
        yield c


def trained_alone() -> list[float]:
    """The losses of one process that sees what all ranks see, each with its own statistics."""
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        for rank in reversed(range(SIZE)):  # rank 0's statistics count
            for name, one in model.named_buffers():
                one.copy_(buffers[name])
            x, y = data_of(rank, step)
            loss = torch.nn.functional.mse_loss(model(x), y)
            (loss / SIZE).backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def test_it_trains_as_one_process_would(cluster: Cluster, tmp_path: Path) -> None:
    found = [f.result(PATIENCE_S) for f in cluster.spmd(train, SIZE, str(tmp_path), 10, None)]
    assert [step.loss for step in found[0][1]] == pytest.approx(trained_alone(), rel=1e-4)
    assert len({digest for _, _, digest in found}) == 1
    assert all(step.contributors == ALL for _, steps, _ in found for step in steps)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_rank_comes_back(cluster: Cluster, tmp_path: Path, victim: int) -> None:
    futures = cluster.spmd(train, SIZE, str(tmp_path), STEPS, victim)
    found = [future.result(PATIENCE_S) for future in futures]
    assert len(list(tmp_path.glob(f"comes-{victim}.*"))) == 2, "another process came back"
    # Bit for bit the same weights and optimizer state at the end, and the same with buffers when
    # each step began: of all, also of the one that came back.
    assert len({digest for _, _, digest in found}) == 1
    by_number: dict[int, set[Any]] = {}
    for _, steps, _ in found:
        for step in steps:
            by_number.setdefault(step.number, set()).add((step.contributors, step.digest))
    assert all(len(what) == 1 for what in by_number.values())
    survivor: list[Step] = found[1 - victim][1]
    assert [step.number for step in survivor] == list(range(STEPS))
    without = [step for step in survivor if step.contributors != ALL]
    assert without[0].number == DIES_AT
    assert {step.contributors for step in without} == {tuple(r for r in ALL if r != victim)}
    again: list[Step] = found[victim][1]
    assert again[0].number >= STEPS // 2
    assert [step.number for step in again] == list(range(again[0].number, STEPS))
    assert survivor[-1].loss < survivor[0].loss / 2


@pytest.mark.long
def test_who_comes_back_too_late_is_told(cluster: Cluster, tmp_path: Path) -> None:
    futures = cluster.spmd(train, SIZE, str(tmp_path), 10, 1, True)
    for rank in (0, 2):
        _, steps, _ = futures[rank].result(PATIENCE_S)
        assert len(steps) == 10
    with pytest.raises(hoplite_mp.PeerLostError):
        futures[1].result(PATIENCE_S)


def unused(rank: int) -> list[Any]:
    """Each rank uses another part of the model, and one part is used by none."""
    import torch

    from hoplite_mp.integrations.torch import DistributedDataParallel

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(4))

        def forward(self, which: list[int]) -> Any:
            return sum(self.parts[i](torch.ones(2)) for i in which)

    group = hoplite_mp.current().group("unused", SIZE, rank)
    model = Parts()
    ddp = DistributedDataParallel(model, group=group)
    ddp([rank, 2]).backward()
    grads = [part.weight.grad for part in model.parts]
    with ddp.no_sync():
        ddp([0]).backward()
    sums = ddp.peers.allreduce(1.0)
    return [None if grad is None else grad.flatten().tolist() for grad in grads] + [float(sums)]


def test_parameters_that_not_all_use(cluster: Cluster) -> None:
    found = [f.result(PATIENCE_S) for f in cluster.spmd(unused, SIZE)]
    third = pytest.approx([1 / 3] * 2)
    for rank, (first, second, both, none, ranks) in enumerate(found):
        # no_sync() adds to the gradient of the rank alone, in place
        assert first == pytest.approx([1 / 3 + 1] * 2)
        assert second == third
        assert both == pytest.approx([(1 + 1 + 2) / 3] * 2), rank
        assert none is None
        assert ranks == SIZE


def test_what_is_refused(cluster: Cluster) -> None:
    model = torch.nn.Linear(2, 2)
    with cluster.group("refused", 1, 0) as group:
        for wrong, text in (
            ({"process_group": 3}, "process_group=3: is set by this class"),
            ({"static_graph": True}, "static_graph=True: has no meaning"),
        ):
            with pytest.raises(ValueError, match=text):
                DistributedDataParallel(model, group=group, **wrong)
        with pytest.raises(TypeError, match=r"state\['lr'\] is a float, which has no state_dict"):
            DistributedDataParallel(model, group=group, state={"lr": 0.1})
        with pytest.raises(TypeError, match="weight is on meta: the module must be on the CPU"):
            DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"), group=group)
    with (
        cluster.group("strict", 1, 0, strict=True) as group,
        pytest.raises(ValueError, match="strict=True"),
    ):
        DistributedDataParallel(model, group=group)


def test_nobody_waits_while_torch_builds_its_part(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the meeting on the others wait, and torch's constructor may take seconds."""
    order = []
    made, meet = torch.nn.parallel.DistributedDataParallel.__init__, StepMembership.meet

    def noted_made(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        order.append("made")

    def noted_meet(self: StepMembership) -> None:
        order.append("meets")
        meet(self)

    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "__init__", noted_made)
    monkeypatch.setattr(StepMembership, "meet", noted_meet)
    with cluster.group("order", 1, 0) as group:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), group=group)
        for _ in range(2):
            ddp(torch.ones(3, 2)).sum().backward()
    assert order == ["made", "meets", "meets"]


IMPORTS = """
import sys, torch
import hoplite_mp, hoplite_mp.integrations.torch
assert "torch._dynamo" not in sys.modules, "who needs the process group alone pays for it, too"
from hoplite_mp.integrations.torch import DistributedDataParallel
before = set(sys.modules)
with hoplite_mp.Cluster(workers=0) as c, c.group("imports", 1, 0) as group:
    DistributedDataParallel(torch.nn.Linear(2, 1), group=group)
print([name for name in set(sys.modules) - before if name.startswith("torch")])
"""


def test_what_takes_long_is_imported_before_a_group_is_joined() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_alone(cluster: Cluster) -> None:
    """A group of one is a group."""
    with cluster.group("one", 1, 0) as group:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), group=group)
        ddp(torch.ones(3, 2)).sum().backward()
        assert ddp.module.weight.grad is not None
        assert ddp.module.weight.grad.tolist() == [[3.0, 3.0]]
        assert (ddp.step_number, ddp.contributors) == (1, (0,))
        ddp.eval()
        ddp(torch.ones(3, 2))
        with torch.no_grad():
            ddp.train()(torch.ones(3, 2))
        assert ddp.step_number == 1
