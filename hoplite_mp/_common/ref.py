"""ObjectRef: a reference to an object, which keeps the object alive.

A ref has two parts: an id with sixteen bytes, and a *hold*, whose deallocation releases the object.
`_client` creates holds; they are opaque here. So refs can be created, compared, hashed, printed and
pickled in any process, with or without a cluster. Operations that need a cluster call
`runtime_hooks`, which `_client` sets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy as np

__all__ = [
    "ByRef",
    "ForwardedHold",
    "NotAnArray",
    "ObjectRef",
    "RuntimeHooks",
    "by_ref",
    "named",
    "runtime_hooks",
]

T = TypeVar("T")
ID_BYTES = 16


# Imported by name, because the module is in a higher package.
CLIENT = "hoplite_mp._client.runtime"


class RuntimeHooks:
    """Operations on a ref that need a cluster. The defaults are for processes without a cluster.

    A ref may be unpickled in a process that has loaded no other module of this library. Only the
    client can determine whether an engine lets this process join a cluster, so the defaults load
    the client first.
    """

    __slots__ = ("attach", "attach_held", "awaited", "contributors", "description", "hold_for")

    contributors: Callable[[ObjectRef[Any]], tuple[int, ...] | None]
    attach: Callable[[bytes], object]
    attach_held: Callable[[bytes, int, float], object]  # for an object that a node holds
    hold_for: Callable[[ObjectRef[Any]], tuple[int, float] | None]  # (node, seconds)
    awaited: Callable[[ObjectRef[Any]], Generator[Any, None, Any]]
    description: Callable[[ObjectRef[Any]], str]  # describes the object; never raises

    def __init__(self) -> None:
        self.contributors = lambda ref: None
        self.attach = _attach_loaded
        self.attach_held = _attach_held_loaded
        self.hold_for = lambda ref: None
        self.description = lambda ref: ""
        self.awaited = _no_cluster


def _load_client() -> RuntimeHooks:
    """Loads the client, which sets the hooks."""
    importlib.import_module(CLIENT)
    return runtime_hooks


def _attach_loaded(object_id: bytes) -> object:
    return _load_client().attach(object_id)


def _attach_held_loaded(object_id: bytes, node: int, seconds: float) -> object:
    return _load_client().attach_held(object_id, node, seconds)


def _no_cluster(ref: ObjectRef[Any]) -> NoReturn:
    raise RuntimeError("a ref can only be awaited in a process with an open cluster")


runtime_hooks = RuntimeHooks()


class NotAnArray:
    """The base class of classes that represent a value that may be an array. Without it, NumPy
    would treat a ref as a scalar, and `np.sum(ref)` would return the ref.

    Arrays of dtype object can contain refs, and compare them with `==` and `!=`. Every other use as
    an array or number raises TypeError. So do functions that copy a ref into an object array
    without passing the dtype (np.full, np.append, np.where). `HOW` is the code that gets the value.
    """

    __slots__ = ()
    HOW = "c.get(ref)"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"this {kind} is not the value itself: use {self.HOW}. To store it in an array: "
            "a = np.empty(n, object); a[:] = ref"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        import numpy as np

        if dtype is None or np.dtype(dtype) != object:
            self._refuse()
        array = np.empty((), object)
        array[()] = self
        return array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        import numpy as np

        if method != "__call__" or ufunc not in (np.equal, np.not_equal):
            self._refuse()
        arrays = [
            value.__array__(object) if isinstance(value, NotAnArray) else value for value in inputs
        ]
        return ufunc(*arrays, **kwargs)


for _name in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow",
    "lshift", "rshift", "and", "xor", "or",
):  # fmt: skip
    for _prefix in ("", "r"):
        setattr(NotAnArray, f"__{_prefix}{_name}__", NotAnArray._refuse)
for _name in ("neg", "pos", "abs", "invert"):
    setattr(NotAnArray, f"__{_name}__", NotAnArray._refuse)


class ObjectRef(NotAnArray, Generic[T]):
    """A reference to an object in the cluster.

    A ref is hashable, immutable, and equal to every ref to the same object. Pass it to tasks
    instead of the value. The object exists as long as any process holds a ref to it, regardless of
    which process has put it. `await ref` returns the value. A ref pickled by code outside this
    library does not keep the object alive while the ref exists only as bytes. With
    `integrations.ray` and `integrations.dask`, the sender's node holds the object for `ref_hold_s`
    after pickling.

    Examples
    --------
    >>> ref = c.put([1, 2, 3])
    >>> c.submit(len, ref).result()
    3
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ("__weakref__", "_hold", "_id")

    _id: bytes
    _hold: object

    def __init__(self, object_id: bytes, hold: object = None) -> None:
        if len(object_id) != ID_BYTES:
            raise ValueError(f"an object id has {ID_BYTES} bytes, not {len(object_id)}")
        _set_id(self, bytes(object_id))
        _set_hold(self, hold)

    @property
    def id(self) -> str:
        """The object id as 32 hexadecimal digits.

        Examples
        --------
        >>> len(c.put(0).id)
        32
        """
        return self._id.hex()

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """The sources of this reduction's result; None until it is ready, and for other objects.

        Returns
        -------
        tuple of int, or None
            Sorted indices into the refs that were passed to `reduce` or `allreduce`.

        Examples
        --------
        >>> total = c.reduce([c.put(1), c.put(2)])
        >>> int(c.get(total)), total.contributors
        (3, (0, 1))
        """
        return runtime_hooks.contributors(self)

    def __await__(self) -> Generator[Any, None, T]:
        """Waits for the read-only value without blocking the event loop. Cancelling the `await`
        does not cancel the task."""
        return runtime_hooks.awaited(self)

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, ObjectRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        """Shows the object's kind, size and location, as far as this process knows them."""
        description = runtime_hooks.description(self)
        return f"ObjectRef({self.id}: {description})" if description else str(self)

    def __str__(self) -> str:
        return f"ObjectRef({self.id})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an ObjectRef is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"an ObjectRef is immutable: cannot delete {name!r}")

    def __copy__(self) -> ObjectRef[T]:
        return self

    def __deepcopy__(self, memo: object) -> ObjectRef[T]:
        return self

    def __reduce__(self) -> tuple[Callable[..., ObjectRef[Any]], tuple[Any, ...]]:
        # Only for foreign picklers, because this library's pickler writes an index into a list of
        # refs.
        hold = self._hold
        held = hold if type(hold) is ForwardedHold else runtime_hooks.hold_for(self)
        return named(self) if held is None else (_attach_held, (self._id, *held))


# Slot descriptors bypass __setattr__, and are twice as fast as object.__setattr__.
_set_id = ObjectRef.__dict__["_id"].__set__
_set_hold = ObjectRef.__dict__["_hold"].__set__


class ForwardedHold(NamedTuple):
    """Replaces a hold in a process that forwards a ref, but has no cluster. It is pickled with the
    ref, because the receiver needs the time for which a node holds the object."""

    node: int
    seconds: float


def named(ref: ObjectRef[Any]) -> tuple[Callable[[bytes], ObjectRef[Any]], tuple[bytes]]:
    """The pickled form of a ref whose object no node holds."""
    return _attach, (ref._id,)


def _attach(object_id: bytes) -> ObjectRef[Any]:
    """Unpickles a ref from a foreign pickler, with a hold if the object exists."""
    return ObjectRef(object_id, runtime_hooks.attach(object_id))


def _attach_held(object_id: bytes, node: int, seconds: float) -> ObjectRef[Any]:
    """Like `_attach`, for an object that a node holds. Raises ObjectLostError if the object is
    gone."""
    hold = runtime_hooks.attach_held(object_id, node, seconds)
    return ObjectRef(object_id, ForwardedHold(node, seconds) if hold is None else hold)


class ByRef(Generic[T]):
    """Marks an argument whose refs are not resolved; created by `by_ref`."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"by_ref({self.value!r})"


def by_ref(x: T) -> ByRef[T]:
    """Passes `x` to a task without resolving the refs inside it.

    Parameters
    ----------
    x : object
        A ref, a Future, or a value that contains them.

    Returns
    -------
    ByRef
        An argument for a task. The task receives `x` itself, but gets refs in place of Futures.

    Examples
    --------
    >>> def kind(x):
    ...     return type(x).__name__
    >>> ref = c.put(1)
    >>> c.submit(kind, ref).result(), c.submit(kind, hoplite_mp.by_ref(ref)).result()
    ('int', 'ObjectRef')
    """
    return ByRef(x)


by_ref.__module__ = "hoplite_mp"  # as users import it
