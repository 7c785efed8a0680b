"""The process group "hoplite" for torch.distributed, implemented with a Group.

With this process group, programs for torch.distributed run on a hoplite_mp cluster. Elements are
sent as one-dimensional arrays, directly from and into the tensors' memory.
"""

from __future__ import annotations

import functools
import itertools
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

import hoplite_mp._api.cluster
from hoplite_mp._serialize.tensors import memory_of
from hoplite_mp.errors import ClosedError
from hoplite_mp.integrations.torch._own_cluster import announce_cluster, check_cluster, open_cluster
from hoplite_mp.integrations.torch._work import Work, WorkThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from hoplite_mp._group.group import Group

__all__ = ["Array", "ProcessGroup", "create", "filled", "flat", "plain"]

# A Group's calls accept numpy arrays. These functions make a numpy array over the memory of a CPU
# tensor, without a copy if possible. torch has dtypes and devices that numpy lacks.


Array = np.ndarray[Any, np.dtype[Any]]
_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES = {getattr(torch, name): np.dtype(name) for name in _NAMES}
_BYTES, _BITS_16 = np.dtype(np.uint8), np.dtype(np.uint16)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with the same elements, detached from the autograd graph. It shares the
    memory of `tensor` if `tensor` is contiguous. Raises TypeError if `tensor` is not dense, or not
    on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"backend 'hoplite' accepts dense tensors on the CPU, not one of {tensor.dtype} on "
            f"{tensor.device} with layout {tensor.layout}; use t.cpu() or t.to_dense()"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor, *, reduced: bool = False) -> Array:
    """The elements of a `plain` tensor as a one-dimensional array in the same memory. `reduced`:
    whether the elements will be reduced, so that the dtype matters; otherwise a dtype that numpy
    lacks becomes bytes."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is not None:
        return memory_of(tensor, (tensor.numel(),), dtype)
    if not reduced:
        return memory_of(tensor, (tensor.numel() * tensor.element_size(),), _BYTES)
    if tensor.dtype is not torch.bfloat16:
        raise TypeError(f"backend 'hoplite' cannot reduce tensors of {tensor.dtype}")
    return memory_of(tensor, (tensor.numel(),), _BITS_16).view(ml_dtypes.bfloat16)


def filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """Returns a `plain` tensor for a result, and a function that copies the result into `tensor`
    if the two do not share memory."""
    one = plain(tensor)
    if one.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return one, lambda: None
    target = tensor.detach()
    return one, lambda: target.copy_(one)


NAME_KEY = "hoplite_mp"  # the key in torch's store under which rank 0 writes the Group's name
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}
Tensors = list[torch.Tensor]


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Creates a process group. `dist.init_process_group` and `dist.new_group` call this function
    on each rank. Ranks on one host that have no cluster open one. Raises ClosedError if such ranks
    are on several hosts, or in different clusters."""
    try:
        cluster = hoplite_mp._api.cluster.current()
    except ClosedError:
        cluster = open_cluster(store, rank)
    else:
        if rank == 0:
            announce_cluster(store, cluster)
        else:
            check_cluster(store, cluster)
    if rank == 0:
        store.set(NAME_KEY, uuid.uuid4().hex)
    name = f"torch.distributed {store.get(NAME_KEY).decode()}"
    group = cluster.group(name, size, rank, strict=True, timeout=timeout.total_seconds())
    return ProcessGroup(group, timeout)


class ProcessGroup(dist.ProcessGroup):
    """A torch process group over the members of a Group. Its size is fixed: after the death of a
    rank, all calls raise PeerLostError. (For ranks that may die, use this package's
    `DistributedDataParallel`.)"""

    def __init__(self, group: Group, timeout: timedelta | None = None) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        # A copy, because `monitored_barrier` changes the member's timeout temporarily.
        self._recv_timeout_s = group._member.timeout
        self._name = ""
        self._caller = WorkThread(f"hoplite_mp {group.name}", group.close)
        # Stops the thread of a process group that is dropped without shutdown().
        self._end = weakref.finalize(self, self._caller.end, 0)

    # -- what torch needs from any process group -------------------------------------------------

    def getBackendName(self) -> str:
        return "hoplite"

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Finishes the pending calls, and leaves the Group."""
        if self._end.detach() is not None:
            self._caller.end(self._timeout_s)

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor, op = _single(tensors), self._op(opts, tensors)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, op.name, opts)
        one, into_tensor = filled(tensor)
        array = flat(one, reduced=True)

        def call() -> None:
            self.group.allreduce(array, op.name, out=array)
            op.after(one)
            into_tensor()

        return self._caller.make(tensors, call, opts)

    def _allreduce_sparse(self, tensor: torch.Tensor, op: str, opts: Any) -> Work:
        """Adds up sparse tensors, as Gloo does: every rank gets all entries, and adds entries with
        the same index in the order of the ranks."""
        if op != "sum":
            raise ValueError(
                f"backend 'hoplite' only adds up sparse tensors; op={op!r} needs dense tensors"
            )
        given = tensor.detach().coalesce()
        part = tuple(given.shape), given.indices(), given.values()

        def call() -> None:
            parts = self.group.allgather(part)
            if len({shape for shape, _, _ in parts}) != 1:
                shapes = [one[0] for one in parts]
                raise ValueError(f"all_reduce: sparse tensors have different shapes: {shapes}")
            indices = torch.cat([one[1] for one in parts], dim=1)
            values = torch.cat([one[2] for one in parts])
            joined = torch.sparse_coo_tensor(indices, values, given.shape, check_invariants=True)
            total = joined.coalesce()
            with torch.no_grad():  # detach() of a sparse tensor has separate indices
                tensor.copy_(total)

        return self._caller.make([tensor], call, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduces all tensors in one call."""
        op = self._op(opts, tensors)
        ones = [plain(tensor) for tensor in tensors]
        if len({one.dtype for one in ones}) != 1:
            raise TypeError("allreduce_coalesced needs tensors of one dtype")
        joined = torch.cat([one.view(-1) for one in ones])
        array = flat(joined, reduced=True)

        def call() -> None:
            self.group.allreduce(array, op.name, out=array)
            op.after(joined)
            parts = joined.split([one.numel() for one in ones])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

        return self._caller.make(tensors, call, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor, op = _single(tensors), self._op(opts, tensors)
        root = int(opts.rootRank)
        one, into_tensor = filled(tensor)
        array = flat(one, reduced=True)
        if self.rank() != root:
            return self._caller.make(
                tensors, lambda: _none(self.group.reduce(array, op.name, root)), opts
            )

        def call() -> None:
            self.group.reduce(array, op.name, root, out=array)
            op.after(one)
            into_tensor()

        return self._caller.make(tensors, call, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        output, parts = _single(outputs), [plain(part).view(-1) for part in _single(inputs)]
        sizes = [part.numel() for part in parts]
        self._check_number("reduce_scatter", "inputs", parts)
        _check_dtypes("reduce_scatter", output, parts)
        if output.numel() != sizes[self.rank()]:
            raise ValueError(
                f"reduce_scatter: input {self.rank()} has {sizes[self.rank()]} elements, the "
                f"output {output.numel()}"
            )
        return self._reduce_scattered(output, torch.cat(parts), sizes, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        if given.numel() != output.numel() * self.size():
            raise ValueError(
                f"reduce_scatter_single: an input of {given.numel()} elements is not "
                f"{self.size()} times an output of {output.numel()}"
            )
        _check_dtypes("reduce_scatter_single", output, [given])
        sizes = [output.numel()] * self.size()
        return self._reduce_scattered(output, plain(given).view(-1), sizes, opts)

    def _reduce_scattered(
        self, output: torch.Tensor, given: torch.Tensor, sizes: list[int], opts: Any
    ) -> Work:
        op = self._op(opts, [output])
        one, into_tensor = filled(output)
        array, out = flat(given, reduced=True), flat(one, reduced=True)
        rank = self.rank()
        begin = sum(sizes[:rank])

        def call() -> None:
            if len(set(sizes)) == 1:
                rows = array.reshape(len(sizes), -1)
                self.group.reduce_scatter(rows, op.name, out=out.reshape(1, -1))
            else:  # a Group's reduce_scatter needs equal parts
                total = self.group.allreduce(array, op.name)
                out[...] = total[begin : begin + sizes[rank]]
            op.after(one)
            into_tensor()

        return self._caller.make([output], call, opts)

    # -- one to all, all to one, all to all --------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        tensor, root = _single(tensors), int(opts.rootRank)
        one, into_tensor = filled(tensor)
        array = flat(one)

        def call() -> None:
            self.group.broadcast(array, root, out=array)
            into_tensor()

        return self._caller.make(tensors, call, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._gathered(_single(outputs), _single(inputs), None, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        root = int(opts.rootRank)
        takes = outputs[0] if self.rank() == root else []
        return self._gathered(takes, _single(inputs), root, opts)

    def _gathered(
        self, outputs: Tensors, given: torch.Tensor, root: int | None, opts: Any = None
    ) -> Work:
        array = flat(plain(given))
        takes = root is None or root == self.rank()
        if takes:
            self._check_number("gather", "outputs", outputs)
            self._check_dtype("gather", [given, *outputs])
        targets = [filled(output) for output in outputs]
        outs = [flat(one) for one, _ in targets] if takes else None

        def call() -> None:
            if root is None:
                self.group.allgather(array, out=outs)
            else:
                self.group.gather(array, root, out=outs)
            for _, into_tensor in targets:
                into_tensor()

        return self._caller.make(outputs, call, opts)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Work:
        if output.numel() != given.numel() * self.size():
            raise ValueError(
                f"all_gather_single: an output of {output.numel()} elements is not {self.size()} "
                f"times an input of {given.numel()}"
            )
        self._check_dtype("all_gather_single", [given, output])
        one, into_tensor = filled(output)
        array = flat(plain(given))
        outs = list(flat(one).reshape(self.size(), -1))

        def call() -> None:
            self.group.allgather(array, out=outs)
            into_tensor()

        return self._caller.make([output], call, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        output, root = _single(outputs), int(opts.rootRank)
        one, into_tensor = filled(output)
        out = flat(one)
        parts: list[Array] = []
        if self.rank() == root:
            self._check_number("scatter", "inputs", _single(inputs))
            self._check_dtype("scatter", [output, *_single(inputs)])
            parts = [flat(plain(part)) for part in _single(inputs)]

        def call() -> None:
            self.group.scatter(parts, root, out=out)
            into_tensor()

        return self._caller.make(outputs, call, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        self._check_number("all_to_all", "outputs", outputs)
        self._check_number("all_to_all", "inputs", inputs)
        self._check_dtype("all_to_all", [*inputs, *outputs])
        parts = [flat(plain(part)) for part in inputs]
        targets = [filled(output) for output in outputs]
        outs = [flat(one) for one, _ in targets]

        def call() -> None:
            self.group.alltoall(parts, out=outs)
            for _, into_tensor in targets:
                into_tensor()

        return self._caller.make(outputs, call, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        self._check_dtype("all_to_all_single", [given, output])
        one, into_tensor = filled(output)
        outs = self._cut(flat(one), output, output_splits, "output")
        parts = self._cut(flat(plain(given)), given, input_splits, "input")

        def call() -> None:
            self.group.alltoall(parts, out=outs)
            into_tensor()

        return self._caller.make([output], call, opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._caller.make([], self.group.barrier, opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier with its own timeout. `dist.monitored_barrier` refuses every backend but Gloo,
        so call this method.

        Parameters
        ----------
        timeout : datetime.timedelta, optional
            How long to wait after the earlier calls have finished; zero does not wait. Default: the
            timeout of the process group.
        wait_all_ranks : bool
            Accepted for compatibility with Gloo: the error always names all missing ranks.

        Raises
        ------
        HopliteTimeoutError
            Some ranks did not join in time; the error names them. This rank leaves the process
            group.
        PeerLostError
            A rank died.
        """
        call = self.group.barrier if timeout is None else functools.partial(self._barrier, timeout)
        opts = dist.BarrierOptions()
        opts.asyncOp = False  # this thread makes the call unless earlier calls are pending
        self._caller.make([], call, opts).wait()

    def _barrier(self, timeout: timedelta) -> None:
        """A Group barrier with its own timeout, during which no other call is made."""
        usual = self.group._member.timeout
        try:
            self.group._member.timeout = timeout.total_seconds()
            self.group.barrier()
        finally:
            self.group._member.timeout = usual

    # -- several tensors in one call ---------------------------------------------------------------

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Fills outputs[rank][i] with inputs[i] of that rank."""
        works = [
            self._gathered([of_rank[i] for of_rank in outputs], one, None, None)
            for i, one in enumerate(inputs)
        ]
        return self._all(list(itertools.chain(*outputs)), works)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all(outputs, [self.all_gather_single(*pair) for pair in pairs])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        # `_all` needs the calls to be made in the thread, so only the operator is taken from the
        # options.
        given = dist.ReduceScatterOptions()
        given.reduceOp = opts.reduceOp if opts is not None else given.reduceOp
        return self._all(outputs, [self.reduce_scatter_single(*pair, given) for pair in pairs])

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        """Sends a message, which is kept until it is received. The returned Work is done, so the
        tensor may be changed."""
        work = Work(tensors)
        work.finish(functools.partial(self.group.send, flat(plain(_single(tensors))), to, tag))
        return work

    def recv(self, tensors: Tensors, source: int | None, tag: int = 0) -> Work:
        one, into_tensor = filled(_single(tensors))
        out = flat(one)
        work = Work(tensors)
        coming = self.group.recv_async(source, tag, self._recv_timeout_s, with_source=True)

        def arrived() -> int:
            value, sender = coming.result()
            if value.size != out.size or value.dtype != out.dtype:
                raise ValueError(
                    f"rank {sender} has sent {value.size} elements of {value.dtype}; the tensor "
                    f"of this recv takes {out.size} of {out.dtype}"
                )
            np.copyto(out, value)
            into_tensor()
            return int(sender)

        coming.add_done_callback(lambda _: work.finish(arrived))
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    # Names of the same calls in earlier versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- details -----------------------------------------------------------------------------------

    def _all(self, outputs: Tensors, works: list[Work]) -> Work:
        """A Work that is done when all of `works` are done. The thread makes the calls of `works`
        first, so it never blocks when it waits for them."""

        def call() -> None:
            for work in works:
                work.wait()

        return self._caller.make(outputs, call)

    def _op(self, opts: Any, tensors: Tensors) -> _Op:
        name = _OPS.get(opts.reduceOp.op if opts is not None else dist.ReduceOp.SUM)
        if name is None:
            raise ValueError(
                f"backend 'hoplite' has no reduction {opts.reduceOp}; it has "
                + ", ".join(op.name for op in _OPS)
            )
        return _Op(name, self.size(), tensors[0].dtype)

    def _check_number(self, call: str, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{call} needs {self.size()} {what}, one for each rank: {len(tensors)}"
            )

    def _check_dtype(self, call: str, tensors: Tensors) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise TypeError(f"{call} needs tensors of one dtype, not {sorted(map(str, dtypes))}")

    def _cut(
        self, array: Array, tensor: torch.Tensor, splits: Sequence[int], what: str
    ) -> list[Array]:
        """Cuts an array into one piece for each rank, with the numbers of rows in `splits`, or
        with equal numbers if `splits` is empty."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size():
                raise ValueError(
                    f"all_to_all_single: {rows} rows of the {what} are not a multiple of "
                    f"{self.size()} ranks"
                )
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single: {what} splits {list(splits)} do not cut {rows} rows for "
                f"{self.size()} ranks"
            )
        width = array.size // rows if rows else 0
        ends = list(itertools.accumulate(splits, initial=0))
        return [array[a * width : b * width] for a, b in itertools.pairwise(ends)]


class _Op:
    """The name of a Group's reduction, and a function to apply to its result afterwards."""

    def __init__(self, name: str, size: int, dtype: torch.dtype) -> None:
        self.name = name
        self.after: Callable[[torch.Tensor], object] = _none
        if name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            if dtype is torch.bool:
                raise TypeError("backend 'hoplite' has no average of bools")
            # The mean of integers is float64 in a Group; torch keeps the dtype.
            self.name = "sum"
            self.after = lambda tensor: tensor.div_(size, rounding_mode="trunc")


def _none(_: Any) -> None:
    return None


def _single(tensors: Sequence[Any]) -> Any:
    """The only tensor in a list. torch passes lists, because in earlier versions a call could use
    several devices of a process."""
    if len(tensors) != 1:
        raise ValueError(f"backend 'hoplite' accepts one tensor for each rank, not {len(tensors)}")
    return tensors[0]


def _check_dtypes(kind: str, output: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Raises ValueError if the dtypes differ: the inputs are reduced in their own dtype, and
    casting the result to another dtype could change its values."""
    others = {str(one.dtype) for one in inputs if one.dtype != output.dtype}
    if others:
        raise ValueError(
            f"{kind}: the output has the dtype {output.dtype}, but inputs have "
            f"{', '.join(sorted(others))}; they must be the same"
        )
