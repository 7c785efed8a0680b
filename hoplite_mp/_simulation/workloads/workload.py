"""The programs of a simulated cluster, drawn at random, using the library's public API.

Programs on all hosts put values and submit tasks, run collectives of all kinds over other programs'
objects, read results on any host, and drop and delete them. Sources become ready early, late or
never.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import ExpectedOperation, WrongEnd
from hoplite_mp._simulation.oracle.values import (
    SOURCES_MAX,
    FaultyLeaf,
    Leaf,
    WrongBytes,
    add,
    delayed,
    make,
    make_once_more,
    sum_of,
)
from hoplite_mp._simulation.workloads.actors import begin_actor
from hoplite_mp._simulation.workloads.deadline import begin_deadline, begin_newcomer
from hoplite_mp._simulation.workloads.durability import (
    begin_copies,
    begin_fetched,
    begin_nested,
    begin_reconstructed,
)
from hoplite_mp._simulation.workloads.groups import begin_group, begin_p2p, begin_rejoining
from hoplite_mp._simulation.workloads.learning import (
    begin_compressed,
    begin_error_reset,
    begin_robust,
)
from hoplite_mp._simulation.workloads.programs import HANGS_S, PATIENCE_S, Programs
from hoplite_mp._simulation.workloads.remote import begin_rerun, begin_resource_tasks, begin_shared
from hoplite_mp._simulation.workloads.sharing import begin_locks, begin_stream
from hoplite_mp._simulation.workloads.store_pressure import begin_store_pressure
from hoplite_mp.errors import HopliteTimeoutError
from hoplite_mp.ml.robust import Median, TrimmedMean

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.virtual.host import VirtualHost

__all__ = ["Workload"]

KINDS = ("reduce", "reduce", "allreduce", "allreduce", "reduce_scatter", "broadcast", "gather",
         "allgather", "alltoall")  # fmt: skip


GROUPED_EVERY = 5  # one of this many reductions takes one source of each of two groups
# In runs with learning, reductions with salt % ROBUST_EVERY == 0 have one of these operators, and
# every second of them has finite=True and a source that is not finite.
ROBUST_EVERY, ROBUST = 3, (Median(), TrimmedMean(1), "mean", "sum")
# Factors for the number of programs of one kind.
SWARM = 0, 0, 1, 1, 3
# Share of runs with programs of only KINDS_FEW kinds, and the number of each kind in these, before
# the factors of SWARM.
FOCUSED, KINDS_FOCUSED, FOCUSED_COUNTS = 0.25, 3, (1, 2, 3)


class Workload(Programs):
    """The programs of one run, which ends when all of them have ended."""

    def begin(self) -> None:
        """Schedules the programs. A run omits some kinds and has more of others (swarm testing:
        Groce et al., ISSTA 2012)."""
        rng = self.rng
        kinds: list[tuple[Callable[[], object], tuple[int, ...]]] = [
            (self._collective, (1, 2, 3)),
            (self._some_gets, (0, 1, 2)),
            (self._tasks, (0, 1, 2)),
            (partial(begin_group, self), (0, 1, 2)),
            (partial(begin_p2p, self), (0, 0, 1)),
            (partial(begin_rejoining, self), (0, 0, 1)),
            (partial(begin_resource_tasks, self), (0, 0, 1)),
            (partial(begin_reconstructed, self), (0, 1, 2)),
            (partial(begin_copies, self), (0, 1, 2)),
            (partial(begin_fetched, self), (0, 1, 2)),
            (partial(begin_nested, self), (0, 1, 2)),
            (partial(begin_actor, self), (0, 1, 2)),
            (partial(begin_shared, self), (0, 0, 1)),
            (partial(begin_rerun, self), (0, 0, 1)),
            (partial(begin_store_pressure, self), (0, 1, 1)),
            (partial(begin_deadline, self), (0, 0, 1)),
            (partial(begin_newcomer, self), (0, 0, 1)),
        ]
        if self.world.environment.collectors:
            kinds += [
                (partial(begin_locks, self), (0, 0, 1)),
                (partial(begin_stream, self), (0, 0, 1)),
            ]
        if self.world.environment.learning:
            kinds += [
                (partial(begin_robust, self), (0, 0, 1)),
                (partial(begin_compressed, self), (0, 0, 1)),
                (partial(begin_error_reset, self), (0, 0, 1)),
            ]
        if rng.random() < FOCUSED:
            kinds = [(begin, FOCUSED_COUNTS) for begin, _ in rng.sample(kinds, KINDS_FOCUSED)]
        for begin, counts in kinds:
            for _ in range(rng.choice(counts) * rng.choice(SWARM)):
                self.world.timeline.after(rng.random() * self.span_s, begin)

    def _source(self, hosts: list[VirtualHost], leaf: Leaf, name: str) -> tuple[VirtualHost, bool]:
        """Starts a program that makes a source, by put() or by a task. Returns its host, and
        whether it is a task."""
        rng = self.rng
        late = rng.choice([0.0, 0.0, 0.0, 0.001, 0.03, 0.3]) * rng.random()
        by_task = rng.random() < 0.4
        board = self.board

        def body(c: Cluster) -> None:
            import time

            ref: Any = None
            try:
                if by_task:
                    ref = c.submit(make, leaf, late).ref
                else:
                    time.sleep(late)
                    ref = c.put(leaf.array())
            finally:
                board.publish(name, None if ref is None else ref._id)
            if by_task and ref is not None:  # tasks end with their program
                c.wait([ref], timeout=HANGS_S)
            board.find(f"{name} is not needed")
            if f"{name} is not needed" not in board.ids:  # timed out, so its users may fail
                self.world.struck.add(host.place)

        host = rng.choice(hosts)
        self.program(host, f"source {name}", body, self.no_errors_on(host, tasks=by_task))
        return host, by_task

    # -- kinds of programs -----------------------------------------------------------------------

    def _some_gets(self) -> None:
        """Starts programs on many hosts that read one object at nearly the same time."""
        hosts, rng = self.hosts(), self.rng
        if not hosts:
            return
        readers = rng.randint(1, len(hosts))
        leaf = Leaf(self.salt(), 0, max(1, self.items(readers)))
        name = f"object {self._operations}"
        maker, by_task = self._source(hosts, leaf, name)
        users = [0]
        for host in rng.sample(hosts, readers):
            users[0] += 1
            get = partial(self._get, name, leaf, users, rng.random() * 0.05)
            holds = self.no_errors_on(host, maker, tasks=by_task)
            self.program(host, f"get of {name}", get, holds)

    def _get(self, name: str, leaf: Leaf, users: list[int], late: float, c: Cluster) -> None:
        import time

        ref = self.ref(c, name)
        time.sleep(late)
        try:
            # First with a short timeout, then without.
            if ref is not None and self.rng.random() < 0.3:
                with contextlib.suppress(HopliteTimeoutError):
                    c.get(ref, timeout=self.rng.choice([0.0, 0.001, 0.05]))
                ref = None
                time.sleep(late)
                ref = self.ref(c, name)
            if ref is not None:
                self.oracle.check_leaf(leaf, self.value(c, ref, f"get of {name}"))
        finally:
            users[0] -= 1
            if not users[0]:
                self.board.publish(f"{name} is not needed", None)

    def _tasks(self) -> None:
        """Starts a program with a tree of tasks, with Futures as arguments, and nested tasks."""
        hosts, rng = self.hosts(), self.rng
        if not hosts:
            return
        salt, width = self.salt(), rng.randint(1, 6)
        items = max(1, self.items(2 * width))
        leaves = [Leaf(salt, index, items) for index in range(width)]
        seconds = [rng.choice([0.0, 0.001, 0.05]) * rng.random() for _ in leaves]
        nested = rng.random() < 0.3
        cancels = rng.random() < 0.2

        def body(c: Cluster) -> None:
            expected = sum((leaf.array() for leaf in leaves[1:]), start=leaves[0].array())
            c = delayed(c, salt)
            if nested:
                total: Any = c.submit(sum_of, leaves, seconds)
            else:
                parts: list[Any] = [
                    c.submit(make, *one) for one in zip(leaves, seconds, strict=True)
                ]
                if cancels:
                    c.submit(make_once_more, leaves[0], 1.0).cancel()
                while len(parts) > 1:
                    parts = [
                        c.submit(add, *parts[at : at + 2]) if at + 1 < len(parts) else parts[at]
                        for at in range(0, len(parts), 2)
                    ]
                total = parts[0]
            try:
                value = total.result(timeout=HANGS_S)
            except HopliteTimeoutError as error:
                raise WrongEnd(f"tasks {salt} hang") from error
            self.oracle.reads += 1
            if not np.array_equal(value, expected):
                raise WrongBytes(f"tasks {salt} have the result {value[:8]}")

        host = rng.choice(hosts)
        self.program(host, f"tasks {salt}", body, self.no_errors_on(host, tasks=True))

    def _collective(self) -> None:
        hosts, rng = self.hosts(), self.rng
        if not hosts:
            return
        kind = rng.choice(KINDS)
        count = 1 if kind == "broadcast" else rng.randint(1, min(2 * len(hosts), SOURCES_MAX))
        ordered = kind in ("reduce", "allreduce") and rng.random() < 0.25
        copies = count
        if kind not in ("reduce", "gather", "alltoall"):
            copies = len(hosts) * (count if kind == "allgather" else 2)
        items, salt = self.items(copies), self.salt()
        folds = kind in ("reduce", "allreduce", "reduce_scatter")
        fortran = kind in ("reduce", "allreduce") and items % 2 == 0 and rng.random() < 0.2
        leaves = tuple(Leaf(salt, i, items, ordered, fortran) for i in range(count))
        deadline = rng.choice([None, None, None, 0.0, 0.01, 0.3]) if folds else None
        if kind == "reduce_scatter":
            deadline = None
        num = rng.choice([count, rng.randint(1, count)])
        if kind not in ("reduce", "allreduce"):
            num = count
        groups: tuple[tuple[int, ...], ...] = ()
        if kind in ("reduce", "allreduce") and salt % GROUPED_EVERY == 0:
            odd, even = tuple(range(1, count, 2)), tuple(range(0, count, 2))
            groups = (odd, even) if odd else (even,)
            num = min(num, len(groups))
        number = self._operations
        contributors_min = 1 if deadline is not None else num
        operation = ExpectedOperation(number, kind, leaves, num, contributors_min, ordered, groups)
        if self.world.environment.learning and kind in ("reduce", "allreduce"):
            operation = _robust(operation)
        leaves = operation.leaves
        names = [f"source {index} of {number}" for index in range(count)]
        makers = [rng.choice(hosts)] if rng.random() < 0.2 else hosts
        sources = [
            self._source(makers, leaf, name) for leaf, name in zip(leaves, names, strict=True)
        ]
        requester, to = rng.choice(hosts), self._destinations(kind, count, hosts)
        part = [host for host in hosts if to is None or f"h{host.number}" in to]
        part += [requester, *(host for host, _ in sources)]
        tasks = any(by_task for _, by_task in sources) or operation.in_task
        ask = partial(self._request, operation, names, deadline, to, part, tasks, requester)
        self.program(requester, f"{kind} {number}", ask, self.no_errors_on(*part, tasks=tasks))

    def _destinations(self, kind: str, count: int, hosts: list[VirtualHost]) -> list[str] | None:
        rng = self.rng
        some = [f"h{host.number}" for host in rng.sample(hosts, rng.randint(1, len(hosts)))]
        if kind == "alltoall":
            return some[:6]
        if kind in ("reduce", "gather"):
            some = some[:1]
        elif kind == "reduce_scatter":
            some = [f"h{rng.choice(hosts).number}" for _ in range(count)]
        return None if rng.random() < 0.5 else some

    def _request(
        self,
        operation: ExpectedOperation,
        names: list[str],
        deadline: float | None,
        to: list[str] | None,
        participants: list[VirtualHost],
        tasks: bool,
        requester: VirtualHost,
        c: Cluster,
    ) -> None:
        """participants: the participating hosts. tasks: whether tasks make sources."""
        refs: list[Any] = []
        try:
            for name in names:
                refs.append(self.ref(c, name))
                if refs[-1] is None:  # there is no such source
                    break
            else:
                self.await_nodes(requester, to or ())
                self._run(operation, refs, deadline, to, participants, tasks, c)
        finally:
            for name in names:
                self.board.publish(f"{name} is not needed", None)

    def _run(
        self,
        operation: ExpectedOperation,
        refs: list[Any],
        deadline: float | None,
        to: Any,
        participants: list[VirtualHost],
        tasks: bool,
        c: Cluster,
    ) -> None:
        kind, what = operation.kind, f"{operation.kind} {operation.number}"
        one = to[0] if to else None
        if kind == "reduce":
            results = [c.reduce(refs, operation.op, num=operation.num, deadline=deadline, to=one,
                                reproducible=operation.ordered, finite=operation.finite,
                                one_of=operation.groups or None)]  # fmt: skip
        elif kind == "allreduce":
            results = [c.allreduce(refs, operation.op, num=operation.num, deadline=deadline, to=to,
                                   reproducible=operation.ordered, finite=operation.finite,
                                   one_of=operation.groups or None)]  # fmt: skip
        elif kind == "reduce_scatter":
            results = c.reduce_scatter(refs, to=to)
        else:
            self._copy(kind, refs, to, what, c)
            return
        dropped = -1
        if len(results) > 1 and self.rng.random() < 0.3:  # the other results must still be readable
            dropped = self.rng.randrange(len(results))
            c.delete([results[dropped]])
        self._begin_readers(operation, results, dropped, participants, tasks)
        for part, ref in enumerate(results):
            if part == dropped:
                continue
            value = self.value(c, ref, what)
            self.oracle.check_result(operation, part, len(results), np.asarray(value),
                                    ref.contributors or ())  # fmt: skip
        until = (
            self.world.timeline.now + PATIENCE_S
        )  # for all readers together, some of which may have died
        for part in range(len(results)):
            for reader in range(READERS_MAX):
                left_s = max(0.0, until - self.world.timeline.now)
                self.board.find(f"result {part} of {operation.number} was read by {reader}", left_s)

    def _copy(self, kind: str, refs: list[Any], to: Any, what: str, c: Cluster) -> None:
        if kind == "broadcast":
            future = c.broadcast(refs[0], to=to)
        elif kind == "gather":
            future = c.gather(refs, to=to[0] if to else None)
        elif kind == "allgather":
            future = c.allgather(refs, to=to)
        else:
            rows = [[ref] * len(to) for ref in refs]
            future = c.alltoall(rows, to=to)
        try:
            future.result(timeout=HANGS_S)
        except TimeoutError as error:
            raise WrongEnd(f"{what} hangs") from error

    def _begin_readers(
        self,
        operation: ExpectedOperation,
        results: list[Any],
        dropped: int,
        participants: list[VirtualHost],
        tasks: bool,
    ) -> None:
        """Starts programs that read the results, except the deleted one."""
        hosts, rng = self.hosts(), self.rng
        for part, ref in enumerate(results):
            name = f"result {part} of {operation.number}"
            self.oracle.made_by[name] = f"{operation.kind} {operation.number}"
            self.board.publish(name, ref._id)
            for reader in range(READERS_MAX):
                done = f"{name} was read by {reader}"
                if hosts and part != dropped and rng.random() < 0.4:
                    late = rng.random() * self.span_s
                    read = partial(self._read, operation, name, part, len(results), late, done)
                    host = rng.choice(hosts)
                    holds = self.no_errors_on(host, *participants, tasks=tasks)
                    self.program(host, f"reader of {name}", read, holds)
                else:
                    self.board.publish(done, None)

    def _read(
        self, operation: ExpectedOperation, name: str, part: int, parts: int, late: float, done:
        str, c: Cluster,
    ) -> None:  # fmt: skip
        import time

        time.sleep(late)
        try:
            ref = self.ref(c, name)
            if ref is not None:
                value = self.value(c, ref, f"reader of {name}")
                self.oracle.check_result(operation, part, parts, np.asarray(value),
                                        ref.contributors or ())  # fmt: skip
        finally:
            self.board.publish(done, None)


READERS_MAX = 2


def _robust(operation: ExpectedOperation) -> ExpectedOperation:
    """The reduction with one of the operators ROBUST, if its salt says so."""
    salt, num, leaves = operation.salt, operation.num, operation.leaves
    if salt % ROBUST_EVERY:
        return operation
    op = ROBUST[salt // (2 * ROBUST_EVERY) % len(ROBUST)]
    finite = isinstance(op, str) or salt % 4 == 1
    leaves = tuple(replace(leaf, ordered=True) for leaf in leaves)
    *others, last = leaves
    if finite and others and last.items and not operation.groups:
        leaves = (*others, FaultyLeaf(salt, last.index, last.items, True, last.fortran))
        num = min(num, len(leaves) - 1)
    contributors_min = min(operation.contributors_min, num)
    if isinstance(op, TrimmedMean) and contributors_min < 2 * op.f + 1:
        op = Median()
    return replace(
        operation,
        leaves=leaves,
        num=num,
        contributors_min=contributors_min,
        ordered=True,
        op=op,
        finite=finite,
    )
