"""Makes the cells for a fold on one node: members, pulled contributions, folds and served cells.

A plan's program (the node's part of the plan) names abstract cells. This file assigns memory, a
dtype and a key to each of them, and starts the engine's folds. Two abstract cells with the same
bytes become one cell of the engine.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _engine, _serialize
from hoplite_mp._common.reduction import has_kernel, result_dtype
from hoplite_mp._node.execution.local_reduce import PlanError, check_alike, slices_of
from hoplite_mp._node.execution.plan_state import NotNow, Slot, SlotName, slot_name
from hoplite_mp._node.objects.remote_objects import parse_layout, payload_layout
from hoplite_mp._planner.program import RESULT, Cell, Program, finisher, members_in

if TYPE_CHECKING:
    from hoplite_mp._node.execution.plan_cells import PlanCells
    from hoplite_mp._node.execution.plan_state import PlanState
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import Key
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["Folding", "StripeLayout", "result_head", "slots_of"]

# The elements, bytes and dtype of each cell of a fold.
#
# A plan divides an object into shares, and all nodes must cut the object at the same elements. The
# dtype of a cell depends on its content: members have the dtype of the sources, partial results
# have the wider dtype of the kernels' accumulators, and results have the dtype of NumPy's result.
# Both ends of a connection derive elements and dtypes from the same plan.


def result_head(
    op: str, layout: bytes, results: int, index: int, contributors: tuple[int, ...]
) -> tuple[bytes, bytes, int]:
    """Returns the (head, layout, number of bytes) of a result on a node that does not compute the
    result."""
    shape, name = parse_layout(layout)
    dtype = _serialize.named_dtype(result_dtype(op, name))
    own = slices_of(shape, results)[index]
    head, _, nbytes = _serialize.encode_array_head(dtype, own, "C", contributors)
    return head, payload_layout(memoryview(head)), nbytes


def _itemsize(kernel: str) -> int:
    return 2 if kernel == "bfloat16" else np.dtype(kernel).itemsize


class StripeLayout:
    """The layout of one plan's cells, for one node. Raises PlanError if they cannot be folded."""

    def __init__(self, plan: ExecuteReduce, program: Program) -> None:
        self.plan = plan
        self.result_cells = set(program.result)
        if not plan.layout:
            raise PlanError("the sources are neither arrays nor numbers: they cannot be reduced")
        self.shape, self.dtype_name = parse_layout(plan.layout)
        kernel = has_kernel(plan.op, self.dtype_name)
        if kernel is None:
            raise PlanError(
                f"op {plan.op!r} on {self.dtype_name} has no kernel, so it cannot be folded "
                "between hosts; without to=, NumPy folds the arrays on the caller's host"
            )
        self.kernel = kernel
        self.member_itemsize = _itemsize(kernel)  # bytes in one element of a source
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
        """Returns (head of the payload, offset of the elements, total bytes) of result `index`."""
        head = self._heads.get(index)
        if head is None:
            dtype = _serialize.named_dtype(self.result_name)
            head = _serialize.encode_array_head(dtype, self.shapes[index], "C", self.plan.members)
            self._heads[index] = head
        return head

    def elements(self, stripe: int) -> tuple[int, int]:
        """The range [begin, end) of a stripe, in elements of the whole array."""
        if self._bounds:
            return self._bounds[stripe]
        shares = self.plan.stripes[stripe]
        return self.count * shares.begin_share >> 20, self.count * shares.end_share >> 20

    def is_empty(self, stripe: int) -> bool:
        """Whether the stripe is empty. A reduce_scatter can have more slices than its array has
        rows."""
        begin, end = self.elements(stripe)
        return begin == end

    def dtype(self, cell: Cell) -> str:
        """The dtype of a cell's elements, as it is named for kernels."""
        if self.is_final(cell):
            return self.result
        return self.kernel if members_in(self.plan, cell) == 1 else self.partial

    def is_final(self, cell: Cell) -> bool:
        """Whether the cell has elements of the final result, which are already divided by the
        number of members (for a mean) and rounded to the result's dtype."""
        if cell in self.result_cells:
            return True
        return cell.part == RESULT and finisher(self.plan, cell.stripe) is None

    def same_bytes(self, one: Cell, other: Cell) -> bool:
        """Whether a fold of `one` alone into `other` would only copy its bytes."""
        if self.plan.op == "mean" and self.is_final(one) != self.is_final(other):
            return False
        return self.dtype(one) == self.dtype(other)

    def itemsize(self, cell: Cell) -> int:
        """The number of bytes in one element of a cell."""
        return _itemsize(self.dtype(cell))

    @property
    def result_itemsize(self) -> int:
        """The number of bytes in one element of the result."""
        return _itemsize(self.result)


def slots_of(plan: ExecuteReduce, program: Program) -> set[SlotName | None]:
    """The names of slots of earlier plans that this plan could continue to fill. Raises PlanError
    if the plan cannot be executed."""
    layout = StripeLayout(plan, program)
    cells = [pull.cell for pull in program.pulls]
    return {slot_name(plan, cell, layout.elements(cell.stripe)) for cell in cells}


class Folding:
    """Makes the cells for one execution. Raises PlanError if the plan cannot be executed."""

    def __init__(
        self, results: ResultWriter, execution: PlanState, plan: ExecuteReduce, cells: PlanCells
    ) -> None:
        self.results = results
        self.config = results.config
        self.client = results.client
        self.execution = execution
        self.plan = plan
        self.cells = cells
        self.stripe_layout = StripeLayout(plan, execution.program)
        # Index of a member on this host -> (its elements, their offset in the payload).
        self.arrays: dict[int, tuple[Any, int]] = {}

    def begin(self) -> None:
        """Makes all cells and queues the pulls. Raises NotNow if there is no memory yet."""
        self._lease()
        self._fold()

    def cell(self, key: Key | None, memory: Any, begin: int, nbytes: int) -> int:
        """Makes an empty cell that a pull or a fold will fill."""
        return self.cells.make(self.execution, key, memory, begin, nbytes, False)

    def member_cell(self, key: Key | None, index: int, stripe: int) -> int:
        """Makes a cell over a stripe of a member on this host."""
        memory, at = self.arrays[index]
        size = self.stripe_layout.member_itemsize
        begin, end = (element * size for element in self.stripe_layout.elements(stripe))
        return self.cells.own(self.execution, key, index, memory, begin, end - begin, at)

    def _lease(self) -> None:
        """Leases blocks for the results that belong on this node, and writes their heads."""
        plan, number = self.plan, self.client.number
        if number not in plan.destinations:
            return
        wanted = [0]
        if plan.kind == "reduce_scatter":
            wanted = [i for i, node in enumerate(plan.destinations) if node == number]
        for index in wanted:
            if index in self.execution.blocks:
                continue
            head, _, nbytes = self.stripe_layout.head(index)
            payload = self.results.lease(nbytes)
            if payload is None:
                raise NotNow("its result does not fit in the store beside the objects in use")
            self.execution.blocks[index] = payload, nbytes
            self.client.write(payload, head, [], [])

    def _fold(self) -> None:
        plan, program = self.plan, self.execution.program
        served = {serve.cell for serve in program.serves}
        pulled = {pull.cell for pull in program.pulls}
        result = set(program.result)
        alias = self._aliases(program, pulled)
        names = {source: cell for cell, source in alias.items()}
        found: dict[Cell, int] = {}

        def key(cell: Cell) -> Key | None:
            return self.execution.key(cell) if cell in served else None

        self.arrays = self._arrays()
        members = dict(program.given)
        for cell, index in program.given:
            if cell in served or not self.stripe_layout.is_empty(cell.stripe):
                found[cell] = self.member_cell(key(cell), index, cell.stripe)
        for pull in program.pulls:
            cell = pull.cell
            name = names.get(cell, cell)
            if {cell, name} & result or name in served:
                memory, begin, nbytes = self._memory(
                    name if name in result else cell, {cell, name} & result
                )
                found[cell] = self.cell(key(name), memory, begin, nbytes)
            else:
                found[cell] = self._slot(cell)
            self.execution.pulls[found[cell]] = cell.node, self.execution.key(cell)
        for fold in program.folds:
            cell = fold.cell
            if cell in alias:
                found[cell] = found[alias[cell]]
                continue
            first, *more = fold.sources
            if first in members and not more and self._is_alias(first, cell, result):
                found[cell] = self.member_cell(key(cell), members[first], cell.stripe)
                continue
            memory, begin, nbytes = self._memory(cell, {cell} & result)
            found[cell] = self.cell(key(cell), memory, begin, nbytes)
            if not nbytes:
                continue
            sources = [found[source] for source in fold.sources]
            self.cells.fold(
                self.execution,
                found[cell],
                sources,
                plan.op,
                self.stripe_layout.kernel,
                len(plan.members),
                [
                    found[source]
                    for source in fold.sources
                    if source not in members and members_in(plan, source) > 1
                ],
                self.stripe_layout.is_final(cell),
            )
        arrived = self.cells.engine.watermark
        pulls = [found[pull.cell] for pull in program.pulls]
        self.execution.queue = [
            cell for cell in pulls if arrived(cell) < max(1, self.execution.sizes[cell])
        ]
        self.execution.missing.update(self.execution.queue)

    def _aliases(self, program: Program, pulled: set[Cell]) -> dict[Cell, Cell]:
        """The pulled cell for each fold that would only copy it and needs no cell of its own."""
        return {
            fold.cell: fold.sources[0]
            for fold in program.folds
            if len(fold.sources) == 1
            and fold.sources[0] in pulled
            and self.stripe_layout.same_bytes(fold.sources[0], fold.cell)
        }

    def _slot(self, cell: Cell) -> int:
        """Returns the cell for one pulled contribution. The cell is kept until the commit. It may
        come from an earlier plan, and may then already be partly filled."""
        bounds = self.stripe_layout.elements(cell.stripe)
        nbytes = (bounds[1] - bounds[0]) * self.stripe_layout.itemsize(cell)
        name = slot_name(self.plan, cell, bounds)
        slot = None if name is None else self.execution.carryover.slots.pop(name, None)
        if slot is None:
            payload, memory = self._scratch(nbytes)
            slot = Slot(self.cell(None, memory, 0, nbytes), payload)
        self.execution.cells[slot.cell] = self.execution.engine_buffer
        self.execution.sizes[slot.cell] = nbytes
        if name is not None:
            self.execution.slots[name] = slot
        elif slot.payload:
            self.execution.scratch.append(slot.payload)
        return slot.cell

    def _is_alias(self, member: Cell, cell: Cell, result: set[Cell]) -> bool:
        """Whether `cell` can use the memory of a member on this host, because it has the same
        bytes and is not part of the result."""
        return cell not in result and self.stripe_layout.same_bytes(member, cell)

    def _arrays(self) -> dict[int, tuple[Any, int]]:
        """For each member on this host, its elements in C order and their offset in the member's
        payload."""
        found = {}
        objects = dict(zip(self.plan.members, self.plan.objects, strict=True))
        for index, view in self.execution.views.items():
            info = check_alike(
                index, objects[index], view, self.stripe_layout.shape, self.stripe_layout.dtype_name
            )
            raw = view[info.offset : info.offset + info.nbytes]
            if info.order == "F" and len(info.shape) > 1:
                itemsize = max(1, info.nbytes // max(1, self.stripe_layout.count))
                plain = np.frombuffer(raw, f"V{itemsize}").reshape(info.shape, order="F")
                raw = memoryview(np.ascontiguousarray(plain).reshape(-1).view(np.uint8).data)
            self.execution.engine_buffer.keep.append(raw)
            found[index] = raw, info.offset
        return found

    def _scratch(self, nbytes: int) -> tuple[int, Any]:
        """Returns (payload, memory) for bytes that are only needed until the result is complete.
        For many bytes, the memory is a block in the store if possible: the store's pages have
        already been touched, and touching new pages takes as long as receiving the bytes. Otherwise
        the memory is outside the store, and the payload is 0."""
        payload = None
        if nbytes > self.config.small_object_bytes_max:
            payload = self.results.lease(nbytes)
        if payload is None:
            memory: Any = np.empty(nbytes, np.uint8)
        else:
            memory = self.client.memory(payload, nbytes)
        self.execution.engine_buffer.keep.append(memory)
        return payload or 0, memory

    def _memory(self, cell: Cell, result: set[Cell]) -> tuple[Any, int, int]:
        """Returns (memory, offset, number of bytes) for a cell. The memory is the result's block if
        `result` is not empty, which means that the cell is part of the result."""
        begin, end = self.stripe_layout.elements(cell.stripe)
        if not result:
            nbytes = (end - begin) * self.stripe_layout.itemsize(cell)
            payload, memory = self._scratch(nbytes)
            if payload:
                self.execution.scratch.append(payload)
            return memory, 0, nbytes
        index = cell.stripe if self.plan.kind == "reduce_scatter" else 0
        payload, whole = self.execution.blocks[index]
        _, offset, _ = self.stripe_layout.head(index)
        size = self.stripe_layout.result_itemsize
        if self.plan.kind == "reduce_scatter":
            begin, end = 0, end - begin
        block = self.client.memory(payload, whole)
        self.execution.engine_buffer.keep.append(block)
        return block, offset + begin * size, (end - begin) * size
