"""Executes a reduction's plan on one host: pins the sources, allocates the result, runs a kernel.

All errors are detected before any byte moves: a source that is gone or is not an array, sources
with different shapes, lack of memory.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _reduce, _serialize
from hoplite_mp._common.reduction import fold, has_kernel, result_dtype
from hoplite_mp._common.ref import ObjectRef

if TYPE_CHECKING:
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._protocol.local import Collective
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = [
    "LocalReduce",
    "PlanError",
    "SourcesGone",
    "address_of",
    "allocate",
    "check",
    "check_alike",
    "prepare",
    "slices_of",
]


NAMED_MAX = 10  # maximum number of sources in an error message


class PlanError(Exception):
    """Raised if a plan can never be executed. The message is shown to the user."""


class SourcesGone(Exception):
    """Raised if members of the plan are permanently gone from this host."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        named = ", ".join(map(str, indices[:NAMED_MAX]))
        more = f" and {len(indices) - NAMED_MAX} more" if len(indices) > NAMED_MAX else ""
        super().__init__(f"sources {named}{more} no longer exist")
        self.indices = indices


class LocalReduce:
    """Keeps the sources pinned and the results allocated until `take` or `drop` is called. One of
    the two must be called after `run`."""

    def __init__(self, results: ResultWriter, op: str, views: list[memoryview]) -> None:
        self.results = results
        self.op = op
        self.views = views
        self.infos: list[_serialize.ArrayInfo] = []
        self.parts: list[tuple[int, int]] = []  # element range of each slice
        self.blocks: list[tuple[int, int]] = []  # (payload, bytes) of each result
        self.targets: list[int] = []  # offset in the store of each slice's bytes
        # Whether all sources have the result's memory order, so that the slices are contiguous.
        self.flat = True
        self.order = "C"  # memory order of the result's elements

    def run(self, threads: int) -> None:
        """Folds all slices, without the GIL if a kernel exists for the operator and dtype."""
        first = self.infos[0]
        name = has_kernel(self.op, first.dtype_name)
        if not self.flat or name is None:
            self._with_numpy()
            return
        itemsize = first.nbytes // max(1, prod(first.shape))
        begins = [address_of(np.frombuffer(view, np.uint8)) for view in self.views]
        base = [at + info.offset for at, info in zip(begins, self.infos, strict=True)]
        for (begin, end), target in zip(self.parts, self.targets, strict=True):
            sources = [address + begin * itemsize for address in base]
            destination = self.results.client.store_address + target
            _reduce.reduce_addresses(self.op, name, sources, destination, end - begin, threads)

    def _with_numpy(self) -> None:
        arrays = [
            _serialize.decode(view, make_ref=lambda object_id: None)  # type: ignore[arg-type,return-value]
            for view in self.views
        ]
        total = fold(self.op, [np.asarray(array) for array in arrays])
        # The fold of a single source returns the source itself, whose dtype may differ from the
        # result's.
        dtype = _serialize.named_dtype(result_dtype(self.op, self.infos[0].dtype_name))
        flat = np.asarray(total, dtype).ravel("F" if self.order == "F" else "C")
        for (begin, end), target in zip(self.parts, self.targets, strict=True):
            raw = flat[begin:end].view(np.uint8) if flat.itemsize else flat[begin:end]
            into = self.results.client.memory(target, raw.nbytes)
            into[:] = raw.tobytes()

    def take(self) -> list[tuple[int, int]]:
        """Unpins the sources, and passes the results' blocks to the caller."""
        blocks, self.blocks = self.blocks, []
        self.drop()
        return blocks

    def drop(self) -> None:
        """Unpins the sources, and frees the results' blocks that have not been taken."""
        self.views = []
        for payload, _ in self.blocks:
            self.results.client.give_back(payload)
        self.blocks = []


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of the first element."""
    return int(array.__array_interface__["data"][0])


def prepare(results: ResultWriter, ask: Collective, plan: ExecuteReduce) -> LocalReduce | None:
    """Pins and checks the members and allocates the results. Returns None if there is no memory
    now."""
    # View all members before reading any from disk. A view pins a member that is in memory, so that
    # it is not spilled when another member needs memory.
    found = {index: results.client.view(ask.sources[index]) for index in plan.order}
    gone = [index for index, got in found.items() if results.is_gone(got)]
    if gone:
        raise SourcesGone(tuple(sorted(gone)))
    execution = LocalReduce(results, ask.op, [])
    first = None
    for index in plan.order:
        view = results.pin(ask.sources[index])
        if view is None or isinstance(view, int):
            return None
        execution.views.append(view)
        execution.infos.append(check(results, ask, index, view, plan.order[0], first))
        first = execution.infos[0]
    return allocate(execution, ask, plan)


def check(
    results: ResultWriter,
    ask: Collective,
    index: int,
    view: memoryview,
    first_index: int,
    first: _serialize.ArrayInfo | None,
) -> _serialize.ArrayInfo:
    """Describes a source's array. Raises PlanError if the source is not an array, or if the
    array has another shape or dtype than the first source."""
    info = _serialize.describe_array(view)
    if info is None:
        raise PlanError(_no_array(index, results.ref(ask.sources[index])))
    if first is not None and (info.shape, info.dtype_name) != (first.shape, first.dtype_name):
        raise PlanError(
            f"sources differ: {first_index} ({results.ref(ask.sources[first_index])}) has shape "
            f"{first.shape} and dtype {first.dtype_name}, {index} "
            f"({results.ref(ask.sources[index])}) has shape {info.shape} and dtype "
            f"{info.dtype_name}"
        )
    return info


def check_alike(
    index: int, object_id: bytes, view: memoryview, shape: tuple[int, ...], dtype_name: str
) -> _serialize.ArrayInfo:
    """Like `check`, but compares with the shape and dtype in the plan instead of a first source."""
    info = _serialize.describe_array(view)
    if info is None:
        raise PlanError(_no_array(index, ObjectRef(object_id)))
    if (info.shape, info.dtype_name) != (shape, dtype_name):
        raise PlanError(
            f"sources differ: {index} ({ObjectRef(object_id)}) has shape {info.shape} and dtype "
            f"{info.dtype_name}, others have shape {shape} and dtype {dtype_name}"
        )
    return info


def _no_array(index: int, ref: ObjectRef[Any]) -> str:
    return (
        f"source {index} ({ref}) is neither an array nor a number: it cannot be reduced by a name; "
        "op=callable, a function of two values, reduces any values"
    )


def allocate(execution: LocalReduce, ask: Collective, plan: ExecuteReduce) -> LocalReduce | None:
    """Leases the results' blocks and writes their heads. Returns None if there is no memory now."""
    slices = len(ask.results)
    first = execution.infos[0]
    try:
        dtype = result_dtype(ask.op, first.dtype_name)
    except TypeError as error:
        raise PlanError(f"op {ask.op!r} is not defined for {first.dtype_name}: {error}") from error
    order = first.order if slices == 1 else "C"
    execution.flat = all(info.order == order for info in execution.infos)
    execution.order = order = order if execution.flat else "C"
    shapes = slices_of(first.shape, slices)
    row = prod(first.shape[1:]) if first.shape else 1
    begin = 0
    for shape in shapes:
        head, offset, nbytes = _serialize.encode_array_head(dtype, shape, order, plan.members)
        payload = execution.results.lease(nbytes)
        if payload is None:
            execution.drop()
            return None
        execution.blocks.append((payload, nbytes))
        execution.results.client.write(payload, head, [], [])
        execution.targets.append(payload + offset)
        count = prod(shape) if slices == 1 else shape[0] * row
        execution.parts.append((begin, begin + count))
        begin += count
    return execution


def slices_of(shape: tuple[int, ...], n: int) -> list[tuple[int, ...]]:
    """The shapes of the arrays that np.array_split(axis=0) returns."""
    if n == 1:
        return [shape]
    if not shape:
        raise PlanError("reduce_scatter needs arrays of at least one dimension")
    size, extra = divmod(shape[0], n)
    return [(size + (i < extra), *shape[1:]) for i in range(n)]
