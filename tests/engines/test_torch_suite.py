"""torch's own tests of torch.distributed, which its wheel contains, with the backend "hoplite".

What does not pass is listed with its reason, and a listed test that begins to pass fails here, so
that the list stays true. Tests that need GPUs, or that torch itself has disabled, skip themselves.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
import hoplite_mp.integrations.torch  # registers the backend
from tests.engines import torch_suite

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 4
TESTS_RUN_MIN = 100  # that pass: fewer would mean that torch skips what it should not
SUITE_S = 600

GPUS = "needs GPUs, and fails instead of skipping itself where there are none"
NCCL = "is about NCCL"
GLOO = "monitored_barrier is Gloo's alone: torch refuses it for other backends by name"
SPARSE = "sparse tensors are refused"
VISION = "needs torchvision"
EXCEPTIONS = {
    "test_all_to_all_cuda": GPUS,
    "test_all_to_all_cuda_complex": GPUS,
    "test_all_to_all_group_cuda": GPUS,
    "test_all_to_all_full_group_cuda": GPUS,
    "test_batch_isend_irecv_op_err": NCCL,
    "test_batch_isend_irecv_mixed_backend_err": NCCL,
    "test_monitored_barrier_gloo": GLOO,
    "test_monitored_barrier_gloo_subgroup": GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": GLOO,
    "test_monitored_barrier_failure_order": GLOO,
    "test_monitored_barrier_wait_all_ranks": GLOO,
    "test_sparse_all_reduce_sum": SPARSE,
    "test_SyncBatchNorm_process_group": VISION,
}
# What `make test-engines-short` runs: each kind of call once or twice.
SHORT = (
    *("test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_reduce_group_max"),
    *("test_broadcast", "test_reduce_product", "test_reduce_group_min", "test_scatter"),
    *("test_gather", "test_all_gather", "test_all_gather_coalesced_simple", "test_barrier"),
    *("test_all_to_all", "test_all_to_all_single_unequal_split", "test_barrier_group"),
    *("test_send_recv", "test_send_recv_any_source", "test_isend", "test_irecv"),
    *("test_gather_object", "test_batch_isend_irecv_gloo", "test_DistributedDataParallelCPU"),
)


def outcomes(chosen: list[str], folder: Path) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with hoplite_mp.Cluster(workers=0) as c:
        ranks = c.spmd(torch_suite.rank_of, SIZE, SIZE, os.fspath(folder), port, chosen)
        return ranks[0].result(SUITE_S)


def test_each_kind_of_call(tmp_path: Path) -> None:
    assert outcomes(list(SHORT), tmp_path) == dict.fromkeys(SHORT, "")


@pytest.mark.long
@pytest.mark.timeout(SUITE_S)
def test_all_but_the_exceptions(tmp_path: Path) -> None:
    chosen = torch_suite.names()
    assert set(chosen) >= EXCEPTIONS.keys()
    found = outcomes(chosen, tmp_path)
    wrong = {
        name: text
        for name, text in found.items()
        if text and not text.startswith("skipped: ") and name not in EXCEPTIONS
    }
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert [name for name in EXCEPTIONS if not found[name]] == [], "these pass now"
    assert sum(not text for text in found.values()) >= TESTS_RUN_MIN
