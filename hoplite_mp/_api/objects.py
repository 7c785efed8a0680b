"""The Cluster methods that store, read and drop objects.

The methods check their arguments and call this process's `Memory` (see `_client/memory.py`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from hoplite_mp._api.collectives import keep_copies
from hoplite_mp._api.explain import Explanation, explain
from hoplite_mp._api.nodes import node_id, other_places
from hoplite_mp._api.pytree import TREE_TYPES, as_items, as_ref, as_refs, tree_map
from hoplite_mp._client.futures import Future
from hoplite_mp._client.memory import whole
from hoplite_mp._common.clock import deadline_ns
from hoplite_mp._common.object_states import VALUED
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.local import Locate
from hoplite_mp.errors import HopliteError, HopliteTimeoutError, ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.runtime import Runtime

__all__ = ["ObjectCalls"]

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]


class ObjectCalls:
    """The `Cluster` methods for objects."""

    _runtime: Runtime

    def put(self, value: T, copies: int = 1) -> ObjectRef[T]:
        """Stores an immutable value and returns its ref.

        Arrays and other buffers are copied into the store once, and read without a copy. An array
        from `empty` is published without a copy, and becomes read-only.

        Parameters
        ----------
        value : object
            Any picklable value. Its protocol 5 buffers (PEP 574) are stored out of band.
        copies : int, optional
            The number of nodes, including this node, that hold the value when `put` returns. The
            value survives if at least one of these nodes survives. A copy that is lost later is
            not replaced. Default: 1.

        Returns
        -------
        ObjectRef
            The object exists as long as any process holds a ref to it.

        Raises
        ------
        StoreFullError
            There was no space for `Config.put_wait_s` seconds, or the value is larger than the
            store's limit.
        NodeLostError, ManagerLostError
            The node of this host, or the cluster, is gone.
        ValueError
            `copies` is below 1, or above the number of nodes.

        Examples
        --------
        >>> ref = c.put(np.arange(4))
        >>> c.get(ref)
        array([0, 1, 2, 3])
        """
        # A small value is stored without help from the node. Without this check, `put` could
        # return a ref to an object that no other process can read.
        self._runtime.memory.check_lost()
        to = other_places(self._runtime, copies)
        ref = self._runtime.memory.put(value)
        keep_copies(self._runtime, ref, copies, to)
        return ref

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Array:
        """Returns an uninitialised, writable array inside the store.

        `put(a)`, or returning `a` from a task, publishes it without a copy and makes it read-only.
        An array that is never published is freed with its last view. Views that were made before
        the publication stay writable: do not write to them.

        Parameters
        ----------
        shape : int or tuple of int
            As for `numpy.empty`.
        dtype : dtype, optional
            As for `numpy.empty`, but not `object`. Default: float64.
        order : {"C", "F"}, optional
            Row-major or column-major. Default: "C".

        Returns
        -------
        numpy.ndarray
            An array of this shape and dtype.

        Raises
        ------
        StoreFullError
            As for `put`.

        Examples
        --------
        >>> a = c.empty((2, 3), np.float32)
        >>> a[:] = 1
        >>> ref = c.put(a)
        >>> a.flags.writeable
        False
        """
        return self._runtime.memory.empty(shape, dtype, order)

    def get(
        self,
        refs: Any,
        timeout: float | None = None,
        copy: bool = False,
        *,
        errors: Literal["raise", "skip"] = "raise",
    ) -> Any:
        """Returns the value of a ref or Future, or several values in order.

        Parameters
        ----------
        refs : ObjectRef, Future, or a nesting of them
            For one ref, the result is its value; for an iterable, a list of values. For any nesting
            of list, tuple and dict (exactly these types), it is the same nesting of values.
        timeout : float, optional
            Seconds to wait; 0 polls. Default: no limit.
        copy : bool, optional
            True: writable copies. Default: read-only, without a copy where possible; writing to
            such an array raises ValueError ("assignment destination is read-only").
        errors : {"raise", "skip"}, optional
            "skip": the list leaves out refs that have failed. `refs` must then be a flat iterable.
            A timeout still raises. Default: "raise".

        Returns
        -------
        object
            The value, or the values. The memory of an array stays valid as long as a view of the
            array exists, even after `delete`, and after the cluster has shut down.

        Raises
        ------
        HopliteTimeoutError
            A value was not ready in time; `get` may be called again.
        CancelledError
            The task was cancelled.
        ObjectLostError
            The object was deleted, or its holders died and it cannot be reconstructed.
        ReduceError
            Too few sources of the reduction succeeded.
        ValueError
            `errors` has another value, or is "skip" for a single ref or a nesting.
        Exception
            The exception of the task. If several refs have failed, the exception of the first one
            in the order of `refs`.

        Examples
        --------
        >>> x, y = c.put(1), c.submit(pow, 2, 3)
        >>> c.get([x, y])
        [1, 8]
        >>> c.get({"x": x, "y": (y, y)})
        {'x': 1, 'y': (8, 8)}
        >>> c.get([x, c.submit(int, "no number"), y], errors="skip")
        [1, 8]
        """
        memory = self._runtime.memory
        memory.check()
        deadline = deadline_ns(timeout)
        if type(refs) is ObjectRef and errors == "raise":
            return memory.read(memory.local_id(refs), deadline, copy)

        def read(ref: ObjectRef[Any]) -> Any:
            return memory.read(memory.local_id(ref), deadline, copy)

        if errors != "raise":
            return self._get_skipping(refs, errors, read)
        if isinstance(refs, (ObjectRef, Future)):
            (ref,) = as_refs(refs)
            return read(ref)
        nested = type(refs) in TREE_TYPES
        refs = tree_map(refs, as_ref) if nested else as_refs(refs)  # checks all before it waits
        try:
            return tree_map(refs, read) if nested else [read(ref) for ref in refs]
        except HopliteTimeoutError:
            raise
        except Exception:  # marks the failures of all refs as read, so that none is reported later
            with contextlib.suppress(HopliteError):
                tree_map(refs, lambda ref: memory.failure_read(memory.local_id(ref)))
            raise

    def _get_skipping(
        self, refs: Any, errors: Any, read: Callable[[ObjectRef[Any]], Any]
    ) -> list[Any]:
        """The values of the refs that have not failed."""
        if errors != "skip":
            raise ValueError(f'errors={errors!r}: it must be "raise" or "skip"')
        nested = type(refs) is dict or (
            type(refs) in TREE_TYPES and any(type(x) in TREE_TYPES for x in refs)
        )
        if nested or isinstance(refs, (ObjectRef, Future)):
            raise ValueError('errors="skip" needs a flat iterable of refs and Futures')
        memory, found = self._runtime.memory, []
        for ref in as_refs(refs):
            try:
                memory.local_id(ref)
            except ObjectLostError:  # no process holds the object any longer
                memory.check()
                continue
            try:
                found.append(read(ref))
            except Exception:
                oid = memory.local_id(ref) if memory.client.usable and memory.lost is None else 0
                if not oid or not self._runtime.tasks.done(oid):  # a timeout, or no cluster
                    raise
                if memory.client.state(oid) in VALUED:  # the value cannot be read or unpickled
                    raise
        return found

    def wait(
        self, refs: Any, num: int | None = None, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Waits until some of the refs or Futures are done, that is, ready or failed.

        Parameters
        ----------
        refs : ObjectRef, Future, or an iterable of them
            The objects to wait for.
        num : int, optional
            The number of refs that must be done, which is also the maximum length of `done`.
            Default: all.
        timeout : float, optional
            Seconds to wait; 0 polls. Default: no limit.

        Returns
        -------
        done, not_done : list, list
            `done`: the first `num` finished refs, in the given order. `not_done`: all other refs,
            in the given order, even if they are done. So a loop can process refs one by one.

        Raises
        ------
        ValueError
            `num` is below 0, or above the number of refs.

        Examples
        --------
        >>> futures = [c.submit(pow, 2, n) for n in range(3)]
        >>> done, not_done = c.wait(futures)
        >>> len(done), len(not_done)
        (3, 0)
        """
        memory, submitter = self._runtime.memory, self._runtime.submitter
        memory.check()
        given = as_items(refs)
        tasks = submitter.tasks
        oids = tasks.ids_of(given, Future, submitter, ObjectRef, memory.client.host_id)
        if 0 in oids:  # another host's object, another cluster's Future, or no ref at all
            oids = [
                oid or memory.local_id(*as_refs([one]))
                for oid, one in zip(oids, given, strict=True)
            ]
        wanted = len(oids) if num is None else whole(num)
        if wanted is None or not 0 <= wanted <= len(oids):
            raise ValueError(f"num={num!r}: it must be from 0 to the number of refs, {len(oids)}")
        deadline = deadline_ns(timeout)
        done, left = tasks.sort_out(given, oids, wanted)
        if len(done) < wanted:
            submitter.waiting.wait_many(oids, wanted, deadline)
            done, left = tasks.sort_out(given, oids, wanted)
        return done, left

    def delete(self, refs: Any) -> None:
        """Drops objects now, even if refs to them still exist.

        A later `get` raises ObjectLostError. For tasks and reductions that still need the object,
        it counts as a failed source. Arrays in its memory stay valid.

        Parameters
        ----------
        refs : ObjectRef, Future, or an iterable of them
            The objects.

        Examples
        --------
        >>> ref = c.put("large")
        >>> c.delete(ref)
        >>> c.get(ref)
        Traceback (most recent call last):
            ...
        hoplite_mp.ObjectLostError: ...
        """
        memory = self._runtime.memory
        memory.check()
        for ref in as_refs(refs):
            memory.delete(ref)

    def locations(self, ref: Any) -> list[str]:
        """The nodes that hold the complete value.

        Parameters
        ----------
        ref : ObjectRef or Future
            One object.

        Returns
        -------
        list of str
            Node ids; empty if the value is not ready, has failed, or is gone.

        Examples
        --------
        >>> c.locations(c.put(0)) == [c.here.id]
        True
        """
        memory = self._runtime.memory
        memory.check()
        (one,) = as_refs(ref)
        oid = memory.local_id(one)
        if memory.client.state(oid) not in VALUED:
            return []
        return [node_id(number) for number in self._runtime.channel.call(Locate(oid)).value]

    def explain(self, ref: Any) -> Explanation:
        """Explains how an object or the result of a collective moves, or has moved, between hosts.

        The manager records transfers as part of its work, so nothing is measured or sent until
        this method is called. The method does not wait for the object.

        Parameters
        ----------
        ref : ObjectRef or Future
            One object, the result of a task or of a collective on refs, or the Future of a
            `broadcast`, `gather`, `allgather` or `alltoall`.

        Returns
        -------
        Explanation
            `print` it, or read its `plans`: their shape, the alternatives, the bandwidths on which
            the choice was based, the expected time and the actual time. If there is no plan, `why`
            gives the reason: for example, processes on one host share memory.

        Raises
        ------
        ObjectLostError
            The ref belongs to another cluster, or its object is gone.
        TypeError
            The argument is neither a ref nor the Future of a task or of a collective on refs.
            Futures of Group calls are refused, because the Group's hosts plan these calls
            themselves: see `trace`.

        Notes
        -----
        The manager keeps the plans of the latest 256 objects, at most 16 for each object. A new
        manager begins without records. Actual times include the time for messages between the hosts
        and the manager.

        Examples
        --------
        >>> total = c.reduce([c.put(np.ones(4)), c.put(np.ones(4))])
        >>> c.wait(total)[1]
        []
        >>> explained = c.explain(total)
        >>> explained.plans[0].kind, explained.plans[0].shape, explained.plans[0].state
        ('reduce', 'one node', 'done')
        """
        return explain(self._runtime, ref)
