"""ObjectRef: the name of an object, together with something that keeps the object alive.

A ref has two parts: sixteen bytes, and a *hold* that keeps the object alive. The hold is opaque
here: `_client` makes it, its deallocation drops the ref, and this module only carries it. So a ref
can be made, compared, hashed, printed and pickled in any process, with or without a cluster;
operations that need a cluster go through `runtime_hooks`, which `_client` fills in.
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


# The name of a module that must not be imported above, because it is in a higher package.
CLIENT = "hoplite_mp._client.runtime"


class RuntimeHooks:
    """The operations of a ref that need a cluster; the defaults are for a process without one.

    A ref may be unpickled in a process that has loaded no other module of this library. Then only
    the client can find out whether an engine makes this process join a cluster. So the defaults
    load the client first.
    """

    __slots__ = ("attach", "attach_held", "awaited", "contributors", "hold_for", "words")

    contributors: Callable[[ObjectRef[Any]], tuple[int, ...] | None]
    attach: Callable[[bytes], object]
    attach_held: Callable[[bytes, int, float], object]  # for bytes whose object a node holds
    hold_for: Callable[[ObjectRef[Any]], tuple[int, float] | None]  # (node, seconds)
    awaited: Callable[[ObjectRef[Any]], Generator[Any, None, Any]]
    words: Callable[[ObjectRef[Any]], str]  # a description of the object; never raises

    def __init__(self) -> None:
        self.contributors = lambda ref: None
        self.attach = _attach_loaded
        self.attach_held = _attach_held_loaded
        self.hold_for = lambda ref: None
        self.words = lambda ref: ""
        self.awaited = _no_cluster


def _load_client() -> RuntimeHooks:
    """Loads the client, which puts its own functions into the hooks."""
    importlib.import_module(CLIENT)
    return runtime_hooks


def _attach_loaded(object_id: bytes) -> object:
    return _load_client().attach(object_id)


def _attach_held_loaded(object_id: bytes, node: int, seconds: float) -> object:
    return _load_client().attach_held(object_id, node, seconds)


def _no_cluster(ref: ObjectRef[Any]) -> NoReturn:
    raise RuntimeError("no cluster has been opened in this process, so no ref can be awaited")


runtime_hooks = RuntimeHooks()


class NotAnArray:
    """Base of classes that stand for a value that may be an array. Without it NumPy would treat a
    ref as a scalar, and `np.sum(ref)` would return the ref.

    An array of dtype object can hold a ref, and compares it with `==` and `!=`. Every other use as
    an array or a number raises TypeError. So do functions that copy it into such an array without
    passing it the dtype (np.full, np.append, np.where). `HOW`: how a user gets the value.
    """

    __slots__ = ()
    HOW = "c.get(ref)"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"this {kind} is not the value that it stands for: use {self.HOW}. To fill an array "
            "with it: a = np.empty(n, object); a[:] = ref"
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
        arrays = [one.__array__(object) if isinstance(one, NotAnArray) else one for one in inputs]
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
    """The name of an object in the cluster.

    A ref is hashable, immutable, and equal to every ref of the same object. It is passed to tasks
    in place of the value. The object lives as long as any process holds a ref to it, whichever
    process has put it. `await ref` gives the value. A ref that was pickled by other code than this
    library does not keep the object alive while it exists only as bytes; with `integrations.ray`
    and `integrations.dask` the sender's node holds the object for `ref_hold_s` after pickling.

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
        """The value, read-only, without blocking the event loop; cancelling the `await` cancels
        nothing else."""
        return runtime_hooks.awaited(self)

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, ObjectRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        """Shows the object's kind, size and location, as far as this process knows them."""
        words = runtime_hooks.words(self)
        return f"ObjectRef({self.id}: {words})" if words else str(self)

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
        # Only foreign picklers call this; our own writes an index into the payload's list of refs.
        hold = self._hold
        held = hold if type(hold) is ForwardedHold else runtime_hooks.hold_for(self)
        return named(self) if held is None else (_attach_held, (self._id, *held))


# Slot descriptors write past our own __setattr__, and twice as fast as object.__setattr__ does.
_set_id = ObjectRef.__dict__["_id"].__set__
_set_hold = ObjectRef.__dict__["_hold"].__set__


class ForwardedHold(NamedTuple):
    """Replaces a hold in a process that forwards a ref without being in a cluster. It is pickled
    again with the ref, for the process that must know how long a node holds the object."""

    node: int
    seconds: float


def named(ref: ObjectRef[Any]) -> tuple[Callable[[bytes], ObjectRef[Any]], tuple[bytes]]:
    """How a ref is pickled if nothing holds its object meanwhile."""
    return _attach, (ref._id,)


def _attach(object_id: bytes) -> ObjectRef[Any]:
    """Unpickles a ref from the bytes of a foreign pickler, with a hold if the object exists."""
    return ObjectRef(object_id, runtime_hooks.attach(object_id))


def _attach_held(object_id: bytes, node: int, seconds: float) -> ObjectRef[Any]:
    """Like `_attach`, if that node has held the object. ObjectLostError: the object is gone."""
    hold = runtime_hooks.attach_held(object_id, node, seconds)
    return ObjectRef(object_id, ForwardedHold(node, seconds) if hold is None else hold)


class ByRef(Generic[T]):
    """Marks an argument whose refs the task receives as refs; made by `by_ref`."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"by_ref({self.value!r})"


def by_ref(x: T) -> ByRef[T]:
    """Passes `x` to a task with the refs inside it unresolved.

    Parameters
    ----------
    x : object
        A ref, a Future, or anything that contains some.

    Returns
    -------
    ByRef
        To be passed as an argument of a task. The task receives `x` itself; a Future inside it
        arrives as its ref.

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
