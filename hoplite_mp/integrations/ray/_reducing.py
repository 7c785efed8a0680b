"""Reductions and broadcasts of the values of Ray refs; see `integrations/_sidecar/reducing.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from hoplite_mp._api.cluster import current
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp.errors import ClosedError
from hoplite_mp.integrations._sidecar.reducing import Reducing, check_reduction
from hoplite_mp.integrations._sidecar.sidecar import CarriedRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hoplite_mp._api.cluster import Cluster

__all__ = ["Reduction", "broadcast", "cluster_here", "reduce"]


class Reduction(ray.ObjectRef):  # type: ignore[misc, unused-ignore]
    """The Ray ref that `reduce` returns. `ray.get`, `ray.wait`, `await` and tasks accept it.
    Inside another value, it is passed as a plain `ray.ObjectRef`."""

    _plain: Any
    _which: Any

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """The sorted indices of the reduced refs. None until the reduction is finished, or if it
        has failed."""
        done, _ = ray.wait([self._which], timeout=0)
        try:
            return ray.get(done[0]) if done else None
        except RayError:
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._plain,)


def _same(ref: Any) -> Any:
    return ref


def reduce(
    refs: Iterable[Any], op: str | Callable[..., Any] = "sum", num: int | None = None
) -> Reduction:
    """Reduces the values of Ray refs, which are arrays, numbers or refs of this library.

    Replaces a tree of tasks, and returns a Ray ref to the result immediately.
    Each value is put into the store of its host, and the values are reduced on their way through
    the network. If a value is lost with a host, and Ray can recompute it, the new value is
    reduced.

    Parameters
    ----------
    refs : iterable of ray.ObjectRef
        The sources. They may belong to tasks that have not finished.
    op : str or callable, optional
        As for `Cluster.reduce`.
    num : int, optional
        The first `num` sources to be ready are reduced; ``.contributors`` of the result lists
        them. Default: all. A failed source is skipped as long as `num` others can still become
        ready.

    Returns
    -------
    Reduction
        `ray.get` returns the result. It raises ReduceError if too many sources have failed, and
        ValueError if the values differ in shape, or if `op` is a name and the values are not
        arrays.

    Raises
    ------
    ValueError
        No refs, num < 1 or > len, or an unknown op.
    TypeError
        One of the refs is not a Ray ref.
    ClosedError
        `init` has not been called.
    """
    sources = list(refs)
    for one in sources:
        if not isinstance(one, ray.ObjectRef):
            raise TypeError(f"expected Ray refs (ray.ObjectRef), not {type(one).__name__}")
    wanted = check_reduction(sources, op, num, _RayReducing.name)
    cluster_here()
    # The sources are inside a list, so that the task begins before they are ready.
    task = ray.remote(_reduce_sources).options(name="hoplite_mp reduce", num_cpus=0, num_returns=2)
    value, which = task.remote(sources, op, wanted)
    made = Reduction(value.binary())
    made._plain, made._which = value, which
    return made


def broadcast(value: Any) -> ObjectRef[Any]:
    """Copies a value, or the value of a Ray ref, into the store of every host of the cluster.

    The value is sent once to each host, through a tree. Tasks and actors on a host read it without
    a copy, with ``hoplite_mp.current().get(ref)``; arrays in it are read-only. `broadcast` returns
    when all hosts of the cluster have the value. Hosts that join later fetch it when a task reads
    it.

    Parameters
    ----------
    value : ray.ObjectRef or object
        A Ray ref stands for its value, which is not sent to the calling process.

    Returns
    -------
    ObjectRef
        A ref to pass to Ray tasks and actors. The value is kept as long as a ref to it exists.

    Raises
    ------
    StoreFullError
        The value does not fit into the store of one of the hosts.
    RayError
        The error of the task whose ref was given.
    ClosedError
        `init` has not been called.
    """
    c = cluster_here()
    if isinstance(value, ray.ObjectRef):
        ref = _taken(_begin_put(value))
    elif isinstance(value, ObjectRef):
        ref = value
    else:
        ref = c.put(value)
    c.broadcast(ref).result()
    return ref


def cluster_here() -> Cluster:
    """The cluster in which this process takes part. Raises ClosedError if `init` has not been
    called."""
    try:
        return current()
    except ClosedError:
        raise ClosedError(
            "no hoplite_mp cluster is running beside this Ray cluster: call "
            "hoplite_mp.integrations.ray.init() in the driver first"
        ) from None


def _reduce_sources(
    sources: list[Any], op: str | Callable[..., Any], num: int
) -> tuple[Any, tuple[int, ...]]:
    """Reduces the sources, inside a Ray task. Returns the result, and the indices of the reduced
    sources."""
    return _RayReducing(sources, num).run(op)


class _RayReducing(Reducing):
    """A reduction whose sources are put into the stores by Ray tasks."""

    name = "refs"

    def __init__(self, sources: list[Any], num: int) -> None:
        super().__init__(len(sources), num)
        self._sources = sources
        self._puts: dict[int, Any] = {}  # the latest put of each source

    def begin_put(self, index: int) -> None:
        self._puts[index] = _begin_put(self._sources[index])

    def wait_for_put(self) -> int:
        index_of = {self._puts[index]: index for index in self.under_way}
        done, _ = ray.wait(list(index_of), num_returns=1)
        return index_of[done[0]]

    def take_put(self, index: int) -> ObjectRef[Any]:
        try:
            return _taken(self._puts[index])
        except RayTaskError as error:
            raise error.cause from error


def _begin_put(source: Any) -> Any:
    """Begins a task that puts the value into the store of the host where Ray has it: Ray runs a
    task on the host that has most of its arguments' bytes."""
    task = ray.remote(_put).options(
        name="hoplite_mp put",
        num_cpus=0,
        num_returns="streaming",
        # The task holds the object until its last yield has been read, and then continues.
        _generator_backpressure_num_objects=1,
    )
    return task.remote(source)


def _put(value: Any) -> Iterator[CarriedRef | None]:
    """Puts the value into the store, inside a Ray task, and holds the object until the second
    yield has been read. A value that is already in the store is not copied."""
    ref = value if isinstance(value, ObjectRef) else current().put(value)
    yield CarriedRef(ref)
    yield None


def _taken(put: Any) -> ObjectRef[Any]:
    """The ref that `_put` has yielded. This process then holds the object, so the task may
    finish."""
    ref: ObjectRef[Any] = ray.get(next(put)).ref
    next(put, None)
    return ref
