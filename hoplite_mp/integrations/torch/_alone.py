"""The process group of size one that torch's DistributedDataParallel gets here.

Why it exists: torch's world has a fixed size, and its DDP makes calls of its own (at its start, for
buffers), which ranks that join later would miss. In a process group of one rank these calls have no
effect; the ranks communicate in another way. Only one of the calls is passed on: the sum over ranks
of the parameters that were used, because all must agree which parameters have a gradient.
It must never know: Groups, gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hoplite_mp.integrations.torch._work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Alone"]

Tensors = list[torch.Tensor]


class Alone(dist.ProcessGroup):
    """Rank 0 of 1. `used` sums a tensor over all ranks, in place."""

    def __init__(self, used: Callable[[torch.Tensor], Work]) -> None:
        super().__init__(0, 1)
        self._used = used

    def getBackendName(self) -> str:
        return "hoplite_alone"

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._used(tensors[0])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Work:
        return _done([])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        outputs[0][0].detach().copy_(inputs[0].detach())
        return _done(outputs[0])


def _done(tensors: Tensors) -> Work:
    work = Work(tensors)
    work.finish(lambda: None)
    return work
