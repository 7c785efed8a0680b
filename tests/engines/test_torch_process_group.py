"""The process group "hoplite" where torch's own tests do not look: all dtypes and operations, odd
tensors, wrong ones, deaths. Ranks are threads here, each with a process group of its own."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hoplite_mp
from hoplite_mp import ClosedError, PeerLostError
from hoplite_mp.integrations.torch import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hoplite_mp import Cluster

SIZE = 3
names = map("ranks {}".format, itertools.count())
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OP = dist.ReduceOp
ARITHMETIC = {OP.SUM: "sum", OP.PRODUCT: "prod", OP.MIN: "min", OP.MAX: "max", OP.AVG: "avg"}
BITWISE = {OP.BAND: "and", OP.BOR: "or", OP.BXOR: "xor"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=0) as c:
        yield c


def ranks(cluster: Cluster, body: Callable[[ProcessGroup, int], Any]) -> list[Any]:
    """What `body` returns on each rank."""
    name = next(names)

    def run(rank: int) -> Any:
        group = cluster.group(name, SIZE, rank, strict=True, timeout=60)
        pg = ProcessGroup(group, datetime.timedelta(seconds=60))
        try:
            return body(pg, rank)
        finally:
            pg.shutdown()

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


def with_op(options: Any, op: Any, root: int = 0) -> Any:
    options.reduceOp = op
    if hasattr(options, "rootRank"):
        options.rootRank = root
    return options


def given(rank: int, dtype: Any, shape: tuple[int, ...] = (4, 5)) -> Any:
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 3 + rank + 1).to(dtype)


def expected(op: Any, tensors: list[Any]) -> Any:
    """By torch, in float64 or int64, rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([tensor.to(wide) for tensor in tensors])
    if op in BITWISE:
        total = stacked[0]
        for one in stacked[1:]:
            total = getattr(torch, f"bitwise_{BITWISE[op]}")(total, one)
    elif op == OP.AVG:
        total = stacked.sum(0).div(SIZE, rounding_mode=None if dtype.is_floating_point else "trunc")
    else:
        found = getattr(stacked, {"min": "amin", "max": "amax"}.get(ARITHMETIC[op], ARITHMETIC[op]))
        total = found(0)
    return total.to(dtype)


def test_every_operation_on_every_dtype(cluster: Cluster) -> None:
    cases = [*itertools.product(ARITHMETIC, FLOATS + INTS), *itertools.product(BITWISE, INTS)]

    def body(pg: ProcessGroup, rank: int) -> list[Any]:
        works = []
        for op, dtype in cases:
            tensor = given(rank, dtype)
            works.append(pg.allreduce([tensor], with_op(dist.AllreduceOptions(), op)))
        return [work.result()[0] for work in works]  # in the order in which they were made

    found = ranks(cluster, body)
    for number, (op, dtype) in enumerate(cases):
        right = expected(op, [given(rank, dtype) for rank in range(SIZE)])
        for got in (one[number] for one in found):
            assert got.dtype is dtype
            assert torch.equal(got, right), (op, dtype)


def test_bools(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> Any:
        found = []
        for op in (OP.SUM, OP.MAX, OP.MIN, OP.PRODUCT, OP.BAND, OP.BOR):
            tensor = torch.tensor([True, rank == 1, False])
            pg.allreduce([tensor], with_op(dist.AllreduceOptions(), op)).wait()
            found.append(tensor.tolist())
        with pytest.raises(TypeError, match="no average of bools"):
            pg.allreduce([torch.tensor([True])], with_op(dist.AllreduceOptions(), OP.AVG))
        return found

    either, both = [True, True, False], [True, False, False]
    assert ranks(cluster, body) == [[either, either, both, both, both, either]] * SIZE


ODD = {
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[:, ::2],
    "expanded back": lambda t: t.clone().as_strided((4, 2), (5, 3)),
    "one number": lambda t: t[0, 0],
    "requires grad": lambda t: t.float().requires_grad_(),
    "channels last": lambda t: t.reshape(1, 2, 2, 5).contiguous(memory_format=torch.channels_last),
    "nothing": lambda t: t[:0],
}


@pytest.mark.parametrize("how", ODD)
def test_odd_tensors(cluster: Cluster, how: str) -> None:
    """Of any strides, and with nothing in them."""

    def of(rank: int) -> Any:
        return ODD[how](given(rank, torch.float32))

    right = sum(of(rank).detach() for rank in range(SIZE))

    def body(pg: ProcessGroup, rank: int) -> None:
        tensor = of(rank)
        pg.allreduce([tensor], with_op(dist.AllreduceOptions(), OP.SUM)).wait()
        assert torch.equal(tensor, right)
        tensor = of(rank)
        options = dist.BroadcastOptions()
        options.rootRank = 1
        pg.broadcast([tensor], options).wait()
        assert torch.equal(tensor, of(1))
        outputs = [torch.empty_like(of(0)) for _ in range(SIZE)]
        pg.allgather([outputs], [of(rank)]).wait()
        assert all(torch.equal(one, of(r)) for r, one in enumerate(outputs))
        joined = torch.empty((SIZE, *of(0).shape))
        pg.all_gather_single(joined, of(rank)).wait()
        assert all(torch.equal(joined[r], of(r)) for r in range(SIZE))
        part = torch.empty_like(of(0))
        options = with_op(dist.ReduceScatterOptions(), OP.AVG)
        pg.reduce_scatter([part], [[of(rank) + i for i in range(SIZE)]], options).wait()
        assert torch.allclose(part, right / SIZE + rank)
        swapped = [torch.empty_like(of(0)) for _ in range(SIZE)]
        pg.alltoall(swapped, [of(rank) * 10 + i for i in range(SIZE)]).wait()
        assert all(torch.equal(one, of(r) * 10 + rank) for r, one in enumerate(swapped))
        work = pg.send([of(rank)], (rank + 1) % SIZE, 3)
        assert work.is_completed()
        pg.recv([part], (rank - 1) % SIZE, 3).wait()
        assert torch.equal(part, of((rank - 1) % SIZE))

    with torch.no_grad():
        ranks(cluster, body)


def test_uneven_parts(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> None:
        parts = [torch.full((i + 1, 2), float(rank + i)) for i in range(SIZE)]
        part = torch.empty(rank + 1, 2)
        options = with_op(dist.ReduceScatterOptions(), OP.SUM)
        pg.reduce_scatter([part], [parts], options).wait()
        assert torch.equal(part, torch.full((rank + 1, 2), 3.0 + 3 * rank))
        outputs = [torch.empty(i + 1) for i in range(SIZE)]
        pg.allgather([outputs], [torch.full((rank + 1,), float(rank))]).wait()
        assert [one.tolist() for one in outputs] == [[0.0], [1.0] * 2, [2.0] * 3]

    ranks(cluster, body)


def test_dtypes_that_numpy_lacks_are_moved(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> None:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
            outputs = [torch.zeros(5, dtype=dtype) for _ in range(SIZE)]
            pg.allgather([outputs], [given(rank, torch.float32, (5,)).to(dtype)]).wait()
            for r, one in enumerate(outputs):
                right = given(r, torch.float32, (5,)).to(dtype)
                assert torch.equal(one.to(torch.complex64), right.to(torch.complex64))
        eights = [torch.ones(3).to(torch.float8_e4m3fn)]
        with pytest.raises(TypeError, match=r"cannot reduce tensors of torch\.float8_e4m3fn"):
            pg.allreduce(eights, with_op(dist.AllreduceOptions(), OP.SUM))

    ranks(cluster, body)


def test_what_is_refused(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> None:
        options = with_op(dist.AllreduceOptions(), OP.SUM)
        with pytest.raises(TypeError, match=r"dense tensors on the CPU, not one of .*sparse_coo"):
            pg.broadcast([torch.eye(3).to_sparse()], dist.BroadcastOptions())
        with pytest.raises(TypeError, match=r"dense tensors on the CPU, not one of .* meta"):
            pg.allreduce([torch.empty(3, device="meta")], options)
        with pytest.raises(ValueError, match="needs 3 outputs, one for each rank: 2"):
            pg.allgather([[torch.empty(1)] * 2], [torch.empty(1)])
        with pytest.raises(ValueError, match="an output of 4 elements is not 3 times"):
            pg.all_gather_single(torch.empty(4), torch.empty(1))
        with pytest.raises(ValueError, match=r"output has the dtype torch.int32.*torch.float32"):
            pg.reduce_scatter([torch.zeros(2, dtype=torch.int32)], [[torch.ones(2)] * 3])
        with pytest.raises(ValueError, match=r"splits \[1, 1, 2\] do not cut 3 rows"):
            pg.all_to_all_single(torch.empty(3), torch.empty(3), [], [1, 1, 2])
        # What is wrong on one rank is an error on all.
        with pytest.raises(ValueError, match=r"rank 0 has shape \(2,\).* rank 1 .*\(3,\)"):
            pg.allreduce([torch.empty(2 + (rank == 1))], options).wait()
        with pytest.raises(ValueError, match="made different calls"):
            (pg.barrier() if rank else pg.allreduce([torch.empty(1)], options)).wait()
        pg.barrier().wait()

    ranks(cluster, body)


def test_futures_and_calls_from_their_callbacks(cluster: Cluster) -> None:
    """A callback may make calls and wait for them, in whichever thread torch runs it: in the one
    that makes the calls, or, where the call is over before the callback is there, in the one that
    gives the callback."""

    def body(pg: ProcessGroup, rank: int) -> Any:
        threads = []

        def then(future: Any) -> Any:
            threads.append(threading.current_thread())
            (one,) = future.value()
            again = pg.allreduce([one.clone()], with_op(dist.AllreduceOptions(), OP.MAX))
            return again.get_future().wait()[0] + 1

        def begun() -> Any:
            tensor = torch.full((3,), float(rank))
            return pg.allreduce([tensor], with_op(dist.AllreduceOptions(), OP.SUM))

        registered = threading.Event()
        pg._caller.make([], registered.wait)  # so that the call is made when the callback is there
        future = begun().get_future().then(then)
        registered.set()
        early = future.wait().tolist()
        work = begun()
        work.wait()
        late = work.get_future().then(then).wait().tolist()
        assert [one is threading.current_thread() for one in threads] == [False, True]
        return early + late

    assert ranks(cluster, body) == [[4.0] * 6] * SIZE


def waited_for(options: Any) -> Any:
    options.asyncOp = False
    return options


def test_a_call_that_the_program_waits_for_runs_in_its_own_thread(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> bool:
        threads = []
        made = pg.group.allreduce

        def allreduce(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread())
            return made(*args, **kwargs)

        pg.group.allreduce = allreduce  # type: ignore[method-assign]
        for options in (waited_for(dist.AllreduceOptions()), dist.AllreduceOptions()):
            pg.allreduce([torch.ones(3)], options).wait()
        return [one is threading.current_thread() for one in threads] == [True, False]

    assert ranks(cluster, body) == [True] * SIZE


def test_a_call_that_the_program_waits_for_comes_after_those_that_it_has_begun(
    cluster: Cluster,
) -> None:
    def body(pg: ProcessGroup, rank: int) -> bool:
        right = True
        for turn in range(30):
            begun = [torch.full((500,), float(turn + each)) for each in range(turn % 4)]
            works = [pg.allreduce([one], dist.AllreduceOptions()) for one in begun]
            own = torch.full((700,), 1000.0 + turn)
            pg.allreduce([own], waited_for(dist.AllreduceOptions())).wait()
            right &= all(work.wait() for work in works)
            right &= set(own.tolist()) == {SIZE * (1000.0 + turn)}
            for each, one in enumerate(begun):
                right &= set(one.tolist()) == {SIZE * float(turn + each)}
        return right

    assert ranks(cluster, body) == [True] * SIZE


def test_a_rank_that_is_interrupted_in_its_own_call_leaves(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> str:
        pg.barrier(waited_for(dist.BarrierOptions())).wait()  # all ranks have joined
        if rank == 0:

            def interrupted(*args: Any, **kwargs: Any) -> Any:
                raise KeyboardInterrupt

            pg.group.allreduce = interrupted  # type: ignore[method-assign]
        try:
            pg.allreduce([torch.ones(3)], waited_for(dist.AllreduceOptions())).wait()
        except (KeyboardInterrupt, PeerLostError) as error:
            return type(error).__name__
        return "no error"

    assert ranks(cluster, body) == ["KeyboardInterrupt", "PeerLostError", "PeerLostError"]


def after(seconds: float, act: Callable[[], Any]) -> None:
    """Has a signal handler act then."""

    def handler(number: int, frame: Any) -> None:
        act()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.parametrize("act", ["raises", "ends"])
def test_what_a_signal_handler_does_in_a_call_that_the_program_waits_for_ends_that_call(
    cluster: Cluster, act: str
) -> None:
    """The handler raises an exception, or ends the process group: this rank leaves at once."""
    before = signal.getsignal(signal.SIGALRM)
    group = cluster.group(f"alarm {act}", 2, 0, strict=True, timeout=60)
    other = cluster.group(f"alarm {act}", 2, 1, strict=True, timeout=60)
    pg = ProcessGroup(group, datetime.timedelta(seconds=60))
    later = other.barrier_async()
    pg.barrier(waited_for(dist.BarrierOptions())).wait()
    later.result(20)

    def raises() -> None:
        raise TimeoutError("mine")

    try:
        begun = time.monotonic()
        with pytest.raises(TimeoutError if act == "raises" else ClosedError):  # noqa: PT012
            after(0.2, raises if act == "raises" else pg.shutdown)
            pg.allreduce([torch.ones(3)], waited_for(dist.AllreduceOptions())).wait()
        assert time.monotonic() - begun < 55, "it took as long as the timeout of the Group"
        with pytest.raises(PeerLostError):  # this call does not take the place of that one
            other.allreduce(np.ones(3, np.float32))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        other.close()
        pg.shutdown()


def killed_rank(rank: int, folder: Path) -> str:
    """One dies while the others wait for it."""
    import torch
    import torch.distributed as dist

    import hoplite_mp.integrations.torch  # noqa: F401

    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("hoplite", store=store, rank=rank, world_size=SIZE)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(3))
    except PeerLostError as error:
        return str(error)
    return ""


def test_a_death_is_an_error_on_all_others(cluster: Cluster, tmp_path: Path) -> None:
    found = cluster.options(retries=0).spmd(killed_rank, SIZE, tmp_path)
    for rank in (0, 2):
        assert "ranks [1] are lost" in found[rank].result(60)
    with pytest.raises(hoplite_mp.WorkerLostError):
        found[1].result(60)


def test_a_rank_whose_call_is_not_over_in_time_leaves(cluster: Cluster) -> None:
    """Its next call would be matched with the one that is not over."""
    groups = [cluster.group("late", 2, rank, strict=True) for rank in range(2)]
    late, other = (ProcessGroup(group, datetime.timedelta(seconds=60)) for group in groups)
    begun = [pg.barrier() for pg in (late, other)]
    for work in begun:
        work.wait()
    groups[0]._member.timeout = 0.1
    works = [late.allreduce([torch.full((2,), 10.0**k)]) for k in range(2)]
    inside: list[Any] = []
    works[0].get_future().then(lambda _: inside.append(late.allreduce([torch.ones(2)])))
    with pytest.raises(hoplite_mp.HopliteTimeoutError, match="Timed out waiting"):
        works[0].wait()
    with pytest.raises(hoplite_mp.ClosedError, match="this member has left"):
        works[1].wait()
    with pytest.raises(hoplite_mp.ClosedError, match="this member has left"):
        inside[0].wait()
    with pytest.raises(hoplite_mp.PeerLostError):
        other.allreduce([torch.full((2,), 1.0)]).wait()
    late.shutdown()
    other.shutdown()


def test_collectives_leave_their_tensors_resizable(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> list[bool]:
        x, y = torch.ones(SIZE * 4), torch.ones(4)
        parts = [torch.ones(4) for _ in range(SIZE)]
        pg.allreduce([x]).wait()
        from_rank_0 = dist.BroadcastOptions()
        from_rank_0.rootRank = 0
        pg.broadcast([y], from_rank_0).wait()
        pg.allgather([parts], [y]).wait()
        pg.all_gather_single(x, y).wait()
        pg.reduce_scatter_single(y, x).wait()
        pg.all_to_all_single(x, x.clone(), [], []).wait()
        half = torch.ones(4, dtype=torch.bfloat16)
        pg.allreduce([half]).wait()
        tensors = [x, y, half, *parts]
        for tensor in tensors:
            tensor.resize_(100)
        return [tensor.untyped_storage().resizable() for tensor in tensors]

    assert ranks(cluster, body) == [[True] * (3 + SIZE)] * SIZE


def test_stored_tensor_stays_resizable(cluster: Cluster) -> None:
    tensor = torch.ones(100_000)
    cluster.put(tensor)
    assert tensor.untyped_storage().resizable()


def test_sparse_tensors_are_added_up_on_every_rank(cluster: Cluster) -> None:
    def body(pg: ProcessGroup, rank: int) -> list[float]:
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[rank, 3, 3]]),
            torch.tensor([1.0, 2.0, rank]),
            (5,),
            check_invariants=True,
        )
        pg.allreduce([tensor], with_op(dist.AllreduceOptions(), OP.SUM)).wait()
        with pytest.raises(ValueError, match="only adds up sparse tensors"):
            pg.allreduce([tensor], with_op(dist.AllreduceOptions(), OP.MAX))
        return list(tensor.to_dense().tolist())

    assert ranks(cluster, body) == [[1.0, 1.0, 1.0, 6.0 + 3.0, 0.0]] * SIZE


@pytest.mark.parametrize("seconds", [0, 0.2])
def test_monitored_barrier_names_missing_ranks_and_leaves_on_timeout(
    cluster: Cluster, seconds: float
) -> None:
    timed_out = threading.Semaphore(0)

    def body(pg: ProcessGroup, rank: int) -> str:
        pg.monitored_barrier(datetime.timedelta(seconds=60))
        pg.monitored_barrier()
        if rank == 0:
            assert all(timed_out.acquire(timeout=20) for _ in range(SIZE - 1))
            with contextlib.suppress(hoplite_mp.PeerLostError):  # if the others' parts are gone
                pg.barrier().wait()
            return "came late"
        try:
            with pytest.raises(
                hoplite_mp.HopliteTimeoutError, match=r"is still waiting for ranks \[0"
            ):
                pg.monitored_barrier(datetime.timedelta(seconds=seconds))
            with pytest.raises(hoplite_mp.ClosedError):
                pg.barrier().wait()
        finally:
            timed_out.release()
        return "timed out"

    assert ranks(cluster, body) == ["came late", "timed out", "timed out"]
