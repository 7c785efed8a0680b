"""Reductions and broadcasts of values of Ray's refs; see `integrations/_sidecar/reducing.py`."""

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
    """The ref of Ray that `reduce` returns: for `ray.get`, `ray.wait`, `await`, and as an argument
    of tasks. Inside other values it is passed as a plain ref."""

    _plain: Any
    _which: Any

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """Sorted indices of the reduced refs, each once. None until the reduction is finished, or
        if it has failed."""
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
    """Reduces the values of refs of Ray, which are arrays, numbers or refs of this library.
    Replaces a tree of tasks, and returns a ref of Ray to the result at once.

    Each value is put into the store of its host, and the sum is computed on the way through the
    network. If possible, Ray recomputes a value that was lost with a host, and the new value is
    reduced.

    Parameters
    ----------
    refs : iterable of ray.ObjectRef
        The sources. They may belong to tasks that have not finished.
    op : str or callable, optional
        As of `Cluster.reduce`.
    num : int, optional
        The first `num` sources to be ready are reduced; ``.contributors`` of the result lists them.
        Default: all. A source that fails is skipped while `num` can still be met.

    Returns
    -------
    Reduction
        `ray.get` returns the result, or raises ReduceError if too many sources have failed, and
        ValueError if the values differ in shape, or are not arrays although `op` is a name.

    Raises
    ------
    ValueError
        No refs, num < 1 or > len, or an unknown op.
    TypeError
        An object other than a ref of Ray is among the refs.
    ClosedError
        `init` has not been called.
    """
    sources = list(refs)
    for one in sources:
        if not isinstance(one, ray.ObjectRef):
            raise TypeError(f"expected refs of Ray (ray.ObjectRef), not {type(one).__name__}")
    wanted = check_reduction(sources, op, num, _RayReducing.name)
    cluster_here()
    # The sources are inside a list, so that the task begins before they are done.
    task = ray.remote(_reduce_sources).options(name="hoplite_mp reduce", num_cpus=0, num_returns=2)
    value, which = task.remote(sources, op, wanted)
    made = Reduction(value.binary())
    made._plain, made._which = value, which
    return made


def broadcast(value: Any) -> ObjectRef[Any]:
    """Copies a value, or the value of a ref of Ray, into the store of every host of the cluster.

    The value is sent once to each host, through a tree. Tasks and actors read it there without a
    copy, by ``hoplite_mp.current().get(ref)``; arrays in it are read-only. Returns when all present
    hosts have the value. Later hosts get it when a task requests it there.

    Parameters
    ----------
    value : ray.ObjectRef or object
        A ref of Ray stands for its value, which is not sent to the calling process.

    Returns
    -------
    ObjectRef
        For arguments of Ray's tasks and actors. The value stays as long as such a ref exists.

    Raises
    ------
    StoreFullError
        The value does not fit into a host's store.
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
    """The cluster in which this process takes part. ClosedError: `init` has not been called."""
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
    """Runs in a task of Ray. Returns the result, and the indices of the reduced sources."""
    return _RayReducing(sources, num).run(op)


class _RayReducing(Reducing):
    """Puts the values in tasks of Ray."""

    name = "refs"

    def __init__(self, sources: list[Any], num: int) -> None:
        super().__init__(len(sources), num)
        self._sources = sources
        self._puts: dict[int, Any] = {}  # the latest of each source

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
    """Begins a task that puts the value into the store where Ray has it. Ray runs a task where most
    bytes of its arguments are."""
    task = ray.remote(_put).options(
        name="hoplite_mp put",
        num_cpus=0,
        num_returns="streaming",
        # The task continues after its last yield has been read; until then it holds the object.
        _generator_backpressure_num_objects=1,
    )
    return task.remote(source)


def _put(value: Any) -> Iterator[CarriedRef | None]:
    """Runs in a task of Ray, and holds the object until the second yield has been read. A value in
    the store is not copied."""
    ref = value if isinstance(value, ObjectRef) else current().put(value)
    yield CarriedRef(ref)
    yield None


def _taken(put: Any) -> ObjectRef[Any]:
    """The ref that `_put` has yielded, with a hold of this process. Then the task may end."""
    ref: ObjectRef[Any] = ray.get(next(put)).ref
    next(put, None)
    return ref
