"""feedback_hook under torch's DistributedDataParallel, over Gloo."""

from __future__ import annotations

import functools
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ml

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=2, memory="256MiB") as made:
        yield made


def train(store: str, compressor: Any, rank: int) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hoplite_mp.ml.torch import FeedbackState, feedback_hook

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        layers = torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1)
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        state = FeedbackState(None, compressor)
        model.register_comm_hook(state, feedback_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
        y = x[:, :1] - x[:, 1:2]
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = ((model(x[rank::2]) - y[rank::2]) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        weights = np.concatenate([one.detach().numpy().ravel() for one in model.parameters()])
        return losses, weights, state.sent
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "compressor", [ml.TopK(0.1), ml.Quantise(), ml.Float16(), ml.PowerSGD(1)], ids=repr
)
def test_hook_over_gloo_trains_and_keeps_the_ranks_alike(cluster: Cluster, compressor: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        body = functools.partial(train, f"{folder}/store", compressor)
        first, second = cluster.get(cluster.spmd(lambda rank: body(rank), 2))
    assert first[1].tobytes() == second[1].tobytes()
    assert first[0][-1] < 0.3 * first[0][0]
    dense = 60 * first[1].nbytes
    assert 0 < first[2] < dense
