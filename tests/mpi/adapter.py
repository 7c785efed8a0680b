"""What mpi4py.MPI is called here: enough of its names, over a Group, to run mpi4py's own tests.

Those tests are the measure of our collectives and messages, and they import `mpi4py.MPI`.
"""

from __future__ import annotations

import concurrent.futures
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp import Group

PROC_NULL, ANY_SOURCE, ANY_TAG, UNDEFINED, ERR_ROOT = -1, -2, -1, -32766, 7


class Exception_(RuntimeError):
    """MPI.Exception."""

    def Get_error_class(self) -> int:
        return ERR_ROOT


class Datatype:
    """One that has a dtype."""

    def __init__(self, code: str | None) -> None:
        self.code = code


class Op:
    """A reduction as a Group takes it: by its name, or by a function of two objects."""

    def __init__(self, name: str | Callable[[Any, Any], Any]) -> None:
        self.name: Any = name

    def Reduce_local(self, source: Any, into: Any) -> None:
        ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
        one, two = Buffer(source), Buffer(into)
        a, b = one.whole, two.whole
        if a.size != b.size or one.code != two.code:
            raise ValueError("message: buffers differ in size or datatype")
        ufunc[self.name](a, b, out=b)


def maxloc(a: Any, b: Any) -> Any:
    return min(a, b, key=lambda one: (-one[0], one[1]))


def minloc(a: Any, b: Any) -> Any:
    return min(a, b)


def replace(a: Any, b: Any) -> Any:
    return b


def no_op(a: Any, b: Any) -> Any:
    return a


IN_PLACE, BOTTOM = object(), object()


class Buffer:
    """What mpi4py accepts as a buffer: the memory, and how much of it for each rank."""

    def __init__(self, spec: Any) -> None:
        parts = list(spec) if isinstance(spec, (tuple, list)) else [spec]
        raw, self.counts, self.displs = parts[0], None, None
        rest = parts[1:]
        code = None
        if rest and isinstance(rest[-1], Datatype):
            code = rest.pop().code
        if rest and isinstance(rest[0], (tuple, list)) and len(rest) == 1 and len(rest[0]) == 2:
            self.counts, self.displs = rest[0]
        elif rest:
            self.counts = rest[0]
        self.code = code
        if isinstance(raw, np.ndarray):
            self.flat = raw.reshape(-1)
            assert raw.size == 0 or np.shares_memory(self.flat, raw)
        else:
            code = code or raw.typecode
            self.flat = np.frombuffer(raw, code) if len(raw) else np.empty(0, code)

    def blocks(self, size: int) -> list[Any]:
        """The part of each rank, as views."""
        counts, displs = self.counts, self.displs
        if counts is None:
            counts = [len(part) for part in np.array_split(self.flat, size)]
        elif not isinstance(counts, (tuple, list)):
            counts = [counts] * size
        if displs is None:
            displs = np.cumsum([0, *counts[:-1]]).tolist()
        elif not isinstance(displs, (tuple, list)):
            displs = [displs * at for at in range(size)]
        return [self.flat[at : at + n] for n, at in zip(counts, displs, strict=True)]

    @property
    def whole(self) -> Any:
        return self.flat if not isinstance(self.counts, int) else self.flat[: self.counts]


class Request:
    """A Future with mpi4py's methods. It is true until it has been waited for."""

    def __init__(self, future: concurrent.futures.Future[Any], finish: Any = None) -> None:
        self._future: concurrent.futures.Future[Any] | None = future
        self._finish = finish or (lambda value: value)

    def __bool__(self) -> bool:
        return self._future is not None

    def wait(self) -> Any:
        future, self._future = self._future, None
        return None if future is None else self._finish(future.result(60))

    def test(self) -> tuple[bool, Any]:
        if self._future is None:
            return True, None
        return (True, self.wait()) if self._future.done() else (False, None)

    def Wait(self) -> bool:
        self.wait()
        return True

    def Test(self) -> bool:
        return self.test()[0]

    @staticmethod
    def waitall(requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        return [request.wait() for request in requests]

    @staticmethod
    def testall(requests: Sequence[Request], statuses: Any = None) -> tuple[bool, Any]:
        if all(one._future is None or one._future.done() for one in requests):
            return True, Request.waitall(requests)
        return False, None

    @staticmethod
    def testsome(requests: Sequence[Request], statuses: Any = None) -> tuple[Any, Any]:
        active = [at for at, one in enumerate(requests) if one]
        if not active:
            return None, None
        found = [at for at in active if requests[at]._future.done()]  # type: ignore[union-attr]
        return found, [requests[at].wait() for at in found]

    @staticmethod
    def waitsome(requests: Sequence[Request], statuses: Any = None) -> tuple[Any, Any]:
        futures = [one._future for one in requests if one._future is not None]
        if futures:
            concurrent.futures.wait(futures, 60, concurrent.futures.FIRST_COMPLETED)
        return Request.testsome(requests)

    @staticmethod
    def testany(requests: Sequence[Request], status: Any = None) -> tuple[int, bool, Any]:
        for at, one in enumerate(requests):
            if one._future is not None and one._future.done():
                return at, True, one.wait()
        return UNDEFINED, not any(requests), None

    @staticmethod
    def waitany(requests: Sequence[Request], status: Any = None) -> tuple[int, Any]:
        futures = [one._future for one in requests if one._future is not None]
        if futures:
            concurrent.futures.wait(futures, 60, concurrent.futures.FIRST_COMPLETED)
        at, _, value = Request.testany(requests)
        return at, value

    @staticmethod
    def Waitall(requests: Sequence[Request]) -> bool:
        Request.waitall(requests)
        return True

    @staticmethod
    def Testall(requests: Sequence[Request]) -> bool:
        return Request.testall(requests)[0]

    @staticmethod
    def Waitany(requests: Sequence[Request]) -> int:
        return Request.waitany(requests)[0]

    @staticmethod
    def Testany(requests: Sequence[Request]) -> tuple[int, bool]:
        return Request.testany(requests)[:2]

    @staticmethod
    def Waitsome(requests: Sequence[Request]) -> Any:
        return Request.waitsome(requests)[0]

    @staticmethod
    def Testsome(requests: Sequence[Request]) -> Any:
        return Request.testsome(requests)[0]


def _done(value: Any = None) -> Request:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(value)
    return Request(future)


def _given(buffer: Any, other: Any) -> bool:
    return buffer is not None and buffer is not IN_PLACE and buffer is not other


class Intracomm:
    """A communicator is a Group. Upper-case calls take buffers, those with an I return Requests."""

    def __init__(self, group: Any = None) -> None:
        self.group: Group = getattr(group, "group", group)

    def Get_size(self) -> int:
        return self.group.size

    def Get_rank(self) -> int:
        return self.group.rank

    def Dup(self) -> Intracomm:
        return Intracomm(self.group.split(0, self.group.rank))

    def Free(self) -> None:
        self.group.close()

    # -- objects -------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.group.barrier()

    def bcast(self, x: Any, root: int = 0) -> Any:
        return self.group.broadcast(x, root)

    def gather(self, x: Any, root: int = 0) -> Any:
        return self.group.gather(x, root)

    def scatter(self, x: Any, root: int = 0) -> Any:
        return self.group.scatter(x, root)

    def allgather(self, x: Any) -> Any:
        return self.group.allgather(x)

    def alltoall(self, x: Any) -> Any:
        return self.group.alltoall(x)

    def reduce(self, x: Any, op: Any = None, root: int = 0) -> Any:
        if not 0 <= root < self.group.size:
            raise Exception_(f"root={root}")
        return self.group.reduce(x, op.name, root)

    def allreduce(self, x: Any, op: Any) -> Any:
        return self.group.allreduce(x, op.name)

    def scan(self, x: Any, op: Any) -> Any:
        return self.group.scan(x, op.name)

    def exscan(self, x: Any, op: Any) -> Any:
        return self.group.exscan(x, op.name)

    # -- messages ------------------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        if dest != PROC_NULL:
            self.group.send(x, dest, tag)

    bsend = send

    def isend(self, x: Any, dest: int, tag: int = 0) -> Request:
        self.send(x, dest, tag)
        return _done()

    ibsend = isend

    def _from(self, source: int, tag: int) -> tuple[int | None, int | None]:
        return None if source == ANY_SOURCE else source, None if tag == ANY_TAG else tag

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        if buf is not None:
            warnings.warn("the buf argument is ignored", UserWarning, stacklevel=2)
        return None if source == PROC_NULL else self.group.recv(*self._from(source, tag))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        if source == PROC_NULL:
            return _done()
        return Request(self.group.recv_async(*self._from(source, tag)))

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Any:
        if PROC_NULL in (dest, source):
            self.send(sendobj, dest, sendtag)
            return self.recv(None, source, recvtag)
        from_, tag = self._from(source, recvtag)
        return self.group.sendrecv(sendobj, dest, from_, sendtag, tag)

    # -- buffers: each says which call with what, and where the result goes --------------------

    def _bcast(self, buffer: Any, root: int = 0) -> Any:
        mem = Buffer(buffer).whole
        return "broadcast", (mem, root), {"out": mem}, None

    def _gather(self, send: Any, into: Any, root: int = 0) -> Any:
        here = self.group.rank == root
        blocks = Buffer(into).blocks(self.group.size) if here else []
        mine = Buffer(send).whole if _given(send, into) else blocks[root]
        return "gather", (mine, root), {}, lambda got: here and _place(got, blocks)

    def _scatter(self, send: Any, into: Any, root: int = 0) -> Any:
        parts = Buffer(send).blocks(self.group.size) if self.group.rank == root else None
        mine = Buffer(into).whole if _given(into, send) else None
        return "scatter", (parts, root), {}, lambda got: mine is None or _place([got], [mine])

    def _allgather(self, send: Any, into: Any) -> Any:
        blocks = Buffer(into).blocks(self.group.size)
        mine = Buffer(send).whole if _given(send, into) else blocks[self.group.rank]
        return "allgather", (mine,), {}, lambda got: _place(got, blocks)

    def _alltoall(self, send: Any, into: Any) -> Any:
        blocks = Buffer(into).blocks(self.group.size)
        parts = Buffer(send).blocks(self.group.size) if _given(send, into) else blocks
        return "alltoall", (parts,), {}, lambda got: _place(got, blocks)

    def _reduce(self, send: Any, into: Any, op: Op, root: int = 0) -> Any:
        mine = Buffer(send if _given(send, into) else into).whole
        out = Buffer(into).whole if self.group.rank == root else None
        return "reduce", (mine, op.name, root), {"out": out}, None

    def _allreduce(self, send: Any, into: Any, op: Op) -> Any:
        out = Buffer(into).whole
        mine = Buffer(send).whole if _given(send, into) else out
        return "allreduce", (mine, op.name), {"out": out}, None

    def _scan(self, send: Any, into: Any, op: Op) -> Any:
        _, args, kwargs, _ = self._allreduce(send, into, op)
        return "scan", args, kwargs, None

    def _exscan(self, send: Any, into: Any, op: Op) -> Any:
        _, args, kwargs, _ = self._allreduce(send, into, op)
        return "exscan", args, kwargs, None

    def _reduce_scatter_block(self, send: Any, into: Any, op: Op) -> Any:
        out = Buffer(into).whole
        mine = Buffer(send).whole if _given(send, into) else out
        rows = mine.reshape(self.group.size, -1) if mine.size else mine.reshape(self.group.size, 0)
        return (
            "reduce_scatter", (rows, op.name), {},
            lambda got: _place([got[0]], [out[: got.size]]),
        )  # fmt: skip

    def _reduce_scatter(self, send: Any, into: Any, counts: Any, op: Op) -> Any:
        """Slices of different lengths: a Group cuts evenly, so all get the whole sum."""
        out = Buffer(into).whole
        mine = Buffer(send).whole if _given(send, into) else out
        counts = counts or self.group.allgather(len(out))
        begin = sum(counts[: self.group.rank])
        end = begin + counts[self.group.rank]
        return (
            "allreduce", (mine, op.name), {},
            lambda got: _place([got[begin:end]], [out[: end - begin]]),
        )  # fmt: skip

    def _barrier(self) -> Any:
        return "barrier", (), {}, None


def _place(got: Sequence[Any], blocks: Sequence[Any]) -> None:
    for one, block in zip(got, blocks, strict=True):
        block[: len(one)] = one


def _forms(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    begin = getattr(Intracomm, "_" + name)

    def blocking(comm: Intracomm, *args: Any, **kwargs: Any) -> None:
        call, given, options, finish = begin(comm, *args, **kwargs)
        got = getattr(comm.group, call)(*given, **options)
        if finish is not None:
            finish(got)

    def later(comm: Intracomm, *args: Any, **kwargs: Any) -> Request:
        call, given, options, finish = begin(comm, *args, **kwargs)
        return Request(getattr(comm.group, call + "_async")(*given, **options), finish)

    return blocking, later


KINDS = {
    "Bcast": "bcast", "Gather": "gather", "Scatter": "scatter", "Allgather": "allgather",
    "Alltoall": "alltoall", "Gatherv": "gather", "Scatterv": "scatter", "Allgatherv": "allgather",
    "Alltoallv": "alltoall", "Reduce": "reduce", "Allreduce": "allreduce", "Scan": "scan",
    "Exscan": "exscan", "Reduce_scatter": "reduce_scatter", "Barrier": "barrier",
    "Reduce_scatter_block": "reduce_scatter_block",
}  # fmt: skip
for _name, _kind in KINDS.items():
    _blocking, _later = _forms(_kind)
    setattr(Intracomm, _name, _blocking)
    setattr(Intracomm, "I" + _name.lower(), _later)

DATATYPES = {
    "SIGNED_CHAR": "b", "SHORT": "h", "INT": "i", "LONG": "l", "LONG_LONG": "q", "FLOAT": "f",
    "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?", "UNSIGNED_CHAR": "B", "UNSIGNED_SHORT": "H",
    "UNSIGNED_INT": "I", "UNSIGNED_LONG": "L", "UNSIGNED_LONG_LONG": "Q", "C_FLOAT_COMPLEX": "F",
    "C_DOUBLE_COMPLEX": "D", "C_LONG_DOUBLE_COMPLEX": "G",
}  # fmt: skip


def install(world: Group) -> types.ModuleType:
    """Makes `from mpi4py import MPI` give this, with that Group as COMM_WORLD."""
    module: Any = types.ModuleType("mpi4py.MPI")
    for name, code in DATATYPES.items():
        setattr(module, name, Datatype(code))
    for name in ("sum", "prod", "min", "max"):
        setattr(module, name.upper(), Op(name))
    for function in (maxloc, minloc, replace, no_op):
        setattr(module, function.__name__.upper(), Op(function))
    module.OP_NULL = Op("null")
    own = world.split(world.rank)
    module.COMM_WORLD, module.COMM_SELF = Intracomm(world), Intracomm(own)
    module.COMM_NULL, module.DATATYPE_NULL = Intracomm(), Datatype(None)
    module.Intracomm, module.Request, module.Exception = Intracomm, Request, Exception_
    for name in (
        "PROC_NULL",
        "ANY_SOURCE",
        "ANY_TAG",
        "UNDEFINED",
        "ERR_ROOT",
        "IN_PLACE",
        "BOTTOM",
    ):
        setattr(module, name, globals()[name])
    # A buffer for bsend: ours is the store.
    module.BSEND_OVERHEAD, module.Alloc_mem = 0, bytearray
    module.Attach_buffer = module.Free_mem = lambda buffer: None
    module.Detach_buffer = lambda: None
    module.THREAD_SINGLE = 0
    module.Query_thread = lambda: 3
    module.Get_version = lambda: (4, 1)
    module.Get_abi_version = lambda: (0, 0)
    module.get_vendor = lambda: ("hoplite_mp", (1, 0, 0))
    package: Any = types.ModuleType("mpi4py")
    package.MPI = module
    sys.modules["mpi4py"], sys.modules["mpi4py.MPI"] = package, module
    return module  # type: ignore[no-any-return]
