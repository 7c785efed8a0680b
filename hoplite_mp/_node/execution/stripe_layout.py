"""Which elements and bytes each cell of a fold has, and in which dtype.

A plan gives shares of an object, and all nodes must cut it at the same elements. A cell's content
decides its dtype: members have the dtype of the sources, partial results the wider one in which
kernels accumulate, results the one that NumPy would give. Both ends of a connection derive elements
and dtypes from the same plan.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hoplite_mp import _engine, _serialize
from hoplite_mp._common.reduction import has_kernel, result_dtype
from hoplite_mp._node.execution.local_reduce import PlanError, slices_of
from hoplite_mp._node.objects.array_layouts import parse_layout, payload_layout
from hoplite_mp._planner.program import RESULT, Cell, Program, finisher, members_in

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["StripeLayout", "result_head"]


def result_head(
    op: str, layout: bytes, results: int, index: int, contributors: tuple[int, ...]
) -> tuple[bytes, bytes, int]:
    """(head, layout, bytes) of a result, for a node that does not compute it."""
    shape, name = parse_layout(layout)
    dtype = _serialize.named_dtype(result_dtype(op, name))
    own = slices_of(shape, results)[index]
    head, _, nbytes = _serialize.encode_array_head(dtype, own, "C", contributors)
    return head, payload_layout(memoryview(head)), nbytes


def _itemsize(kernel: str) -> int:
    return 2 if kernel == "bfloat16" else np.dtype(kernel).itemsize


class StripeLayout:
    """One plan's cells as one node sees them. Raises PlanError if they cannot be folded."""

    def __init__(self, plan: ExecuteReduce, program: Program) -> None:
        self.plan = plan
        self.mine = set(program.result)
        if not plan.layout:
            raise PlanError("the sources are neither arrays nor numbers: they cannot be reduced")
        self.shape, self.dtype_name = parse_layout(plan.layout)
        kernel = has_kernel(plan.op, self.dtype_name)
        if kernel is None:
            raise PlanError(
                f"op {plan.op!r} on {self.dtype_name} has no kernel, so it cannot be folded "
                "between hosts: leave to= out, and it is done by NumPy on the caller's host"
            )
        self.kernel = kernel
        self.member_itemsize = _itemsize(kernel)  # bytes of one element of a source
        self.partial = _engine.accumulator_dtype(plan.op, kernel)
        self.result_name = result_dtype(plan.op, self.dtype_name)
        result = has_kernel(plan.op, self.result_name)
        self.result = kernel if result is None else result
        self.count = prod(self.shape)
        slices = max(1, len(plan.results))
        self.shapes = slices_of(self.shape, slices)
        self._heads: dict[int, tuple[bytes, int, int]] = {}
        self._bounds: list[tuple[int, int]] = []
        begin = 0
        for shape in self.shapes if plan.kind == "reduce_scatter" else ():
            self._bounds.append((begin, begin + prod(shape)))
            begin += prod(shape)

    def head(self, index: int) -> tuple[bytes, int, int]:
        """(head of the payload, offset of the elements, bytes in all) of result `index`."""
        known = self._heads.get(index)
        if known is None:
            dtype = _serialize.named_dtype(self.result_name)
            known = _serialize.encode_array_head(dtype, self.shapes[index], "C", self.plan.members)
            self._heads[index] = known
        return known

    def elements(self, stripe: int) -> tuple[int, int]:
        """[begin, end) of a stripe, in elements of the whole array."""
        if self._bounds:
            return self._bounds[stripe]
        one = self.plan.stripes[stripe]
        return self.count * one.begin_share >> 20, self.count * one.end_share >> 20

    def is_empty(self, stripe: int) -> bool:
        """Has the stripe no elements? A reduce_scatter may have more slices than its array rows."""
        begin, end = self.elements(stripe)
        return begin == end

    def dtype(self, cell: Cell) -> str:
        """The dtype of a cell's elements, by its name for the kernels."""
        if self.is_final(cell):
            return self.result
        return self.kernel if members_in(self.plan, cell) == 1 else self.partial

    def is_final(self, cell: Cell) -> bool:
        """Are the elements already those of the result (divided and rounded)?"""
        if cell in self.mine:
            return True
        return cell.part == RESULT and finisher(self.plan, cell.stripe) is None

    def same_bytes(self, one: Cell, other: Cell) -> bool:
        """Would a fold of `one` alone into `other` only copy its bytes?"""
        if self.plan.op == "mean" and self.is_final(one) != self.is_final(other):
            return False
        return self.dtype(one) == self.dtype(other)

    def itemsize(self, cell: Cell) -> int:
        """Bytes of one element of a cell."""
        return _itemsize(self.dtype(cell))

    @property
    def result_itemsize(self) -> int:
        """Bytes of one element of the result."""
        return _itemsize(self.result)
