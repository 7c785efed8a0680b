"""Folds sources that together do not fit in memory, one chunk at a time.

A chunk is as many of the next sources as fit. They are restored from disk, pinned, folded into the
partial result, and unpinned. The result is bitwise equal to that of a single pass, because the
partial result has the dtype in which the kernels accumulate (cext/reduce_kernels.h).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _reduce, _serialize
from hoplite_mp._common.reduction import fold, has_kernel, result_dtype
from hoplite_mp._node.execution.local_reduce import (
    LocalReduce,
    SourcesGone,
    address_of,
    allocate,
    check,
)

if TYPE_CHECKING:
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._protocol.local import Collective
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["ChunkedReduce", "NotInChunks"]

Array = np.ndarray[Any, np.dtype[Any]]
# A chunk pins at most 1/2 of the store's limit, because other objects also need memory.
CHUNK_SHARE = 2
# The number of elements converted to the accumulator's dtype at a time. They fit in the CPU caches.
WIDENED_ITEMS = 1 << 17


class NotInChunks(Exception):
    """Raised if the reduction has no partial result into which further sources could be folded."""


class ChunkedReduce(LocalReduce):
    """A reduction in chunks. Calls to `pin` and `run` alternate until `done` is True. The first
    call to `pin` allocates the result."""

    def __init__(self, results: ResultWriter, ask: Collective, plan: ExecuteReduce) -> None:
        super().__init__(results, ask.op, [])
        self.ask = ask
        self.plan = plan
        self.at = 0  # number of sources that have been folded
        self.first: _serialize.ArrayInfo | None = None
        # The dtype to which elements are widened for the accumulator, if that is necessary.
        self.wide: np.dtype[Any] | None = None
        # offset in the store of the accumulator's block, or 0 if it is the result's block
        self.accumulator = 0

    @property
    def done(self) -> bool:
        return self.at == len(self.plan.order)

    # -- pinning -------------------------------------------------------------------------------

    def pin(self) -> bool:
        """Pins the next chunk. Returns False if there is no memory now for a single source or for
        the result."""
        self.views, self.infos = [], []
        left = self.results.store.limit // CHUNK_SHARE
        for index in self.plan.order[self.at :]:
            if self.views and left < self.infos[-1].nbytes:
                break
            view = self.results.pin(self.ask.sources[index])
            if view is None:
                break
            if isinstance(view, int) or self.results.is_gone(view):
                raise SourcesGone((index,))
            info = check(self.results, self.ask, index, view, self.plan.order[0], self.first)
            left -= info.nbytes
            self.views.append(view)
            self.infos.append(info)
            if self.first is None and not self._begin(info):
                self.drop()
                return False
        return bool(self.views)

    def _begin(self, first: _serialize.ArrayInfo) -> bool:
        """Allocates the result, and an accumulator if the kernel needs one that is wider than the
        result. Returns False if there is no memory now."""
        name = first.dtype_name
        kernel = has_kernel(self.op, name)
        count = prod(first.shape)
        half = kernel in ("float16", "bfloat16")
        if half:
            self.wide = np.dtype(np.float32)
        elif kernel is not None and self.op == "mean" and np.dtype(kernel).kind in "biu":
            # The accumulator is as wide as the result, so the result's block serves for both.
            self.wide = np.dtype(np.float64)
        self.parts, self.targets = [], []
        if allocate(self, self.ask, self.plan) is None:
            return False
        if kernel is None and result_dtype(self.op, name) != name:
            self.drop()
            raise NotInChunks(
                f"its sources together exceed the store, and {self.op!r} of {name} cannot be "
                "folded in portions"
            )
        if half:
            payload = self.results.lease(4 * count)
            if payload is None:
                return False
            self.accumulator = payload
        self.first = first
        return True

    def let_go(self) -> None:
        """Unpins the chunk that has been folded."""
        self.views, self.infos = [], []

    def drop(self) -> None:
        super().drop()
        self.infos = []
        self.first = None
        if self.accumulator:
            self.results.client.give_back(self.accumulator)
            self.accumulator = 0

    # -- folding, in a thread ------------------------------------------------------------------

    def run(self, threads: int) -> None:
        """Folds the pinned chunk."""
        sources = [self._flat(v, i) for v, i in zip(self.views, self.infos, strict=True)]
        kernel = has_kernel(self.op, self.infos[0].dtype_name)
        if kernel is None:
            self._with_functions(sources)
        elif self.wide is not None:
            self._widened(sources, kernel, threads)
        else:
            self._with_kernel(sources, kernel, threads)
        self.at += len(sources)
        if self.done:
            self._finish(kernel, sources[0].dtype)

    def _flat(self, view: memoryview, info: _serialize.ArrayInfo) -> Array:
        """A source's elements in the memory order of the result."""
        name = info.dtype_name
        dtype = np.dtype(np.uint16) if name == "bfloat16" else _serialize.named_dtype(name)
        array: Array = np.frombuffer(view, dtype, prod(info.shape), info.offset)
        if info.order == self.order:
            return array
        return array.reshape(info.shape, order=_as_order(info.order)).ravel(_as_order(self.order))

    def _into(self, target: int, count: int, dtype: np.dtype[Any]) -> Array:
        return np.frombuffer(self.results.client.memory(target, count * dtype.itemsize), dtype)

    def _with_kernel(self, sources: list[Array], kernel: str, threads: int) -> None:
        op = "sum" if self.op == "mean" else self.op
        for (begin, end), target in zip(self.parts, self.targets, strict=True):
            destination = self.results.client.store_address + target
            addresses = [address_of(source) + begin * source.itemsize for source in sources]
            if self.at:
                addresses.insert(0, destination)
            _reduce.reduce_addresses(op, kernel, addresses, destination, end - begin, threads)

    def _widened(self, sources: list[Array], kernel: str, threads: int) -> None:
        op = "sum" if self.op == "mean" else self.op
        assert self.wide is not None
        for (begin, end), total in zip(self.parts, self._totals(), strict=True):
            for number, source in enumerate(sources):
                for at in range(0, end - begin, WIDENED_ITEMS):
                    into = total[at : at + WIDENED_ITEMS]
                    part = _widen(source[begin + at : begin + at + len(into)], kernel, self.wide)
                    if self.at + number == 0:
                        into[...] = part
                        continue
                    places = [address_of(into), address_of(part)]
                    _reduce.reduce_addresses(
                        op, self.wide.name, places, places[0], len(part), threads
                    )

    def _totals(self) -> list[Array]:
        """The partial result in the accumulator's dtype, one array for each slice."""
        assert self.wide is not None
        places = self.targets
        if self.accumulator:
            places = [self.accumulator + begin * self.wide.itemsize for begin, _ in self.parts]
        return [
            self._into(place, end - begin, self.wide)
            for place, (begin, end) in zip(places, self.parts, strict=True)
        ]

    def _with_functions(self, sources: list[Array]) -> None:
        for (begin, end), target in zip(self.parts, self.targets, strict=True):
            into = self._into(target, end - begin, sources[0].dtype)
            pieces = [source[begin:end] for source in sources]
            op = "sum" if self.op == "mean" else self.op
            into[...] = fold(op, [into, *pieces] if self.at else pieces)

    def _finish(self, kernel: str | None, dtype: np.dtype[Any]) -> None:
        """Divides the total for a mean, and rounds a wider accumulator once to the result's
        dtype."""
        divisor = len(self.plan.order)
        if self.wide is None:
            if self.op == "mean":
                for (begin, end), target in zip(self.parts, self.targets, strict=True):
                    quotient = self._into(target, end - begin, dtype)
                    quotient[...] = quotient / divisor
            return
        for total, target in zip(self._totals(), self.targets, strict=True):
            if self.op == "mean":
                total /= total.dtype.type(divisor)
            if kernel == "bfloat16":
                for at in range(0, total.size, WIDENED_ITEMS):
                    narrow = _bfloat16(total[at : at + WIDENED_ITEMS])
                    self._into(target + 2 * at, narrow.size, narrow.dtype)[...] = narrow
            elif kernel == "float16":
                self._into(target, total.size, dtype)[...] = total


def _as_order(order: str) -> Any:
    return order


def _widen(part: Array, kernel: str, wide: np.dtype[Any]) -> Array:
    if kernel == "bfloat16":
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.astype(wide)


def _bfloat16(total: Array) -> Array:
    """Rounds to the nearest value, ties to even. A NaN stays a NaN even though its low bits are cut
    off."""
    bits = total.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)
