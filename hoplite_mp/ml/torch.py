"""Compressed gradients for torch's DistributedDataParallel, as a communication hook.

``model.register_comm_hook(FeedbackState(group, TopK(0.001)), feedback_hook)`` replaces the
allreduce of each bucket of gradients. It works with process groups for CPU tensors: "hoplite" and
"gloo".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ImportError("hoplite_mp.ml.torch needs torch: pip install 'hoplite-mp[torch]'") from error

from hoplite_mp.ml._compressors import PowerSGD
from hoplite_mp.ml._feedback import Feedback

if TYPE_CHECKING:
    from hoplite_mp.ml._compressors import Compressor

__all__ = ["FeedbackState", "feedback_hook"]

Array = np.ndarray[Any, np.dtype[Any]]


class _RanksOfTorch:
    """The Group calls that `Feedback` needs, made on a process group whose ranks do not die."""

    strict = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.contributors = tuple(range(self.size))

    def allgather(self, x: Any) -> list[Any]:
        if not isinstance(x, np.ndarray):
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, x, group=self._group)
            return found
        sizes = self._sizes([x.nbytes] * self.size)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: x.nbytes] = _tensor(x)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._group)
        return [one[:size].numpy() for one, size in zip(parts, sizes, strict=True)]

    def alltoall(self, parts: list[Array]) -> list[Array]:
        """Implemented with send and recv, because not all releases of Gloo have an alltoall for
        parts of different sizes."""
        sizes = self._sizes([part.nbytes for part in parts])
        received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        received[self.rank] = _tensor(parts[self.rank])
        works = []
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works.append(dist.isend(_tensor(parts[to]), group=self._group, group_dst=to))
            works.append(dist.irecv(received[source], group=self._group, group_src=source))
        for work in works:
            work.wait()
        return [one.numpy() for one in received]

    def allreduce(self, x: Array, op: str) -> Array:
        total = torch.from_numpy(np.array(x))
        dist.all_reduce(total, group=self._group)
        if op == "mean":
            total /= self.size
        found: Array = total.numpy()
        return found

    def _sizes(self, mine: list[int]) -> list[int]:
        """The number of bytes that each rank sends to this rank."""
        sent = torch.tensor(mine, dtype=torch.int64)
        rows = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(rows, sent, group=self._group)
        return [int(row[self.rank]) for row in rows]


def _tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(x, copy=True).reshape(-1).view(np.uint8))


class FeedbackState:
    """The state of `feedback_hook` on one rank: a Feedback over the ranks of a process group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The process group; None is the default one. If a rank dies, the training stops.
    compressor : TopK, Threshold, RandomBlocks, Quantise, Float16 or PowerSGD
        The compressor, which must be the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, compressor: Compressor | PowerSGD) -> None:
        chosen = dist.group.WORLD if group is None else group
        ranks: Any = _RanksOfTorch(chosen)
        self.feedback = Feedback(ranks, compressor)

    @property
    def sent(self) -> int:
        """Bytes of codes that this rank has sent."""
        return self.feedback.sent

    @property
    def received(self) -> int:
        """Bytes of codes that this rank has received."""
        return self.feedback.received


def feedback_hook(
    state: FeedbackState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket of gradients to their mean, with error feedback.

    Parameters
    ----------
    state : FeedbackState
    bucket : torch.distributed.GradBucket
        float32 or float64, on the CPU. torch may rebuild its buckets once, after the first step.
        Residuals belong to the shapes of a bucket, and start as zeros for new shapes.

    Returns
    -------
    torch.futures.Future
        A completed Future of the bucket's buffer, which contains the result.

    Raises
    ------
    ValueError
        As for `Feedback.allreduce`.
    """
    buffer = bucket.buffer()
    with torch.no_grad():
        if isinstance(state.feedback.compressor, PowerSGD):  # which needs each gradient's shape
            for at, one in enumerate(bucket.gradients()):
                name = f"{bucket.index()}.{at} {tuple(one.shape)}"
                one.copy_(torch.from_numpy(state.feedback.allreduce(name, one.numpy())))
        else:
            name = f"{bucket.index()} {buffer.numel()}"
            total = state.feedback.allreduce(name, buffer.numpy())
            buffer.copy_(torch.from_numpy(total))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# torch compares these annotations with its classes, so they must not be strings.
feedback_hook.__annotations__.update(
    {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
)
