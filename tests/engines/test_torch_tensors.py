"""Tensors as arguments, results, objects: what they are afterwards, and where their bytes lie."""

from __future__ import annotations

import pickle
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hoplite_mp
from hoplite_mp import _serialize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

LARGE = 1 << 20
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    torch.float8_e4m3fn,
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=2) as c:
        yield c


def same(one: Any, other: Any) -> bool:
    if one.dtype is torch.float8_e4m3fn:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)


def sample(dtype: Any, n: int) -> Any:
    return torch.arange(n).remainder(7).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000, 100_000])
def test_every_dtype_comes_back(cluster: Cluster, dtype: Any, n: int) -> None:
    tensor = sample(dtype, n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = cluster.get(cluster.put({"inside": tensor, "alone": [tensor]}))
    assert same(got["inside"], tensor)
    assert got["inside"] is got["alone"][0]


def test_tensors_share_the_bytes_of_the_store(cluster: Cluster) -> None:
    """Two reads map the same pages: the process does not grow by what it reads."""
    ref = cluster.put(torch.ones(LARGE * 16))  # 64 MiB
    before = private_bytes()
    tensors = [cluster.get(ref) for _ in range(4)]
    assert all(tensor.sum().item() == LARGE * 16 for tensor in tensors)
    assert private_bytes() - before < 32 << 20


def private_bytes() -> int:
    """What this process has written, without what it shares with the store."""
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def test_writing_changes_the_own_tensor_alone(cluster: Cluster) -> None:
    ref = cluster.put(torch.zeros(LARGE))
    mine, other = cluster.get(ref), cluster.get(ref)
    mine[5] = 1
    mine[-1] = 2
    mine += 1
    assert mine[5] == 2
    assert mine[-1] == 3
    assert mine[0] == 1
    assert other.abs().sum() == 0
    assert cluster.get(ref).abs().sum() == 0
    assert cluster.submit(lambda t: float(t.abs().sum()), ref).result(60) == 0


def test_tensors_outlive_their_object_and_the_cluster() -> None:
    with hoplite_mp.Cluster(workers=0) as c:
        ref = c.put(torch.arange(LARGE))
        tensor = c.get(ref)
        part = tensor[10:20]
        c.delete(ref)
        del ref
        others = [c.put(torch.full((LARGE,), 7)) for _ in range(4)]
        assert tensor[-1] == LARGE - 1
        del tensor, others
    assert part.tolist() == list(range(10, 20))


def test_arguments_and_results(cluster: Cluster) -> None:
    def work(x: Any, y: Any) -> Any:
        x += 1  # a task's arguments by value are its own
        return {"sum": x + y, "y": y}

    x, y = torch.ones(LARGE), torch.full((LARGE,), 2.0)
    got = cluster.submit(work, x, cluster.put(y)).result(60)
    assert same(got["sum"], torch.full((LARGE,), 4.0))
    assert same(got["y"], y)
    assert x[0] == 1


def test_no_elements_in_the_stream() -> None:
    encoded = _serialize.encode([torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bfloat16)])
    assert len(encoded.head) < 2000
    assert [buffer.nbytes for buffer in encoded.buffers] == [4 * LARGE, 2 * LARGE]


def test_a_part_travels_alone_and_what_is_shared_stays_shared(cluster: Cluster) -> None:
    whole = torch.arange(LARGE, dtype=torch.float32).reshape(1024, -1)
    assert _serialize.encode(whole[3]).nbytes < 10_000
    row, column, turned, again = cluster.get(cluster.put((whole[3], whole[:, 3], whole.t(), whole)))
    assert same(row, whole[3])
    assert same(column, whole[:, 3])
    assert same(turned, whole.t())
    assert turned.stride() == whole.t().stride()
    again[0, 1] = -5
    assert turned[1, 0] == -5


def test_what_else_a_tensor_is(cluster: Cluster) -> None:
    leaf = torch.ones(LARGE, requires_grad=True)
    conjugated = torch.ones(LARGE, dtype=torch.complex64).mul(1j).conj()
    sparse = torch.eye(100).to_sparse()
    parameter = torch.nn.Parameter(torch.ones(LARGE))
    module = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    got = cluster.get(cluster.put([leaf, conjugated, sparse, parameter, module, torch.float32]))
    assert got[0].requires_grad
    assert got[0].is_leaf
    assert same(got[1].resolve_conj(), conjugated.resolve_conj())
    assert same(got[2].to_dense(), torch.eye(100))
    assert type(got[3]) is torch.nn.Parameter
    for name, tensor in module.state_dict().items():
        assert same(got[4].state_dict()[name], tensor)
    got[4](torch.ones(2, 300)).sum().backward()
    assert got[5] is torch.float32


def test_other_pickles_are_torchs_own() -> None:
    """Only streams of this library name its functions."""
    assert b"hoplite" not in pickle.dumps(torch.ones(3))


def test_torch_is_not_imported_by_this_library() -> None:
    import subprocess

    code = "import hoplite_mp, sys; c = hoplite_mp.Executor(1); c.submit(pow, 2, 3).result(); "
    code += "c.shutdown(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
