"""The programs of a simulated cluster, drawn at random, using the library's public API.

Faults need work to disturb. Programs on all hosts put values and submit tasks, run collectives of
all kinds over other programs' objects, read results on any host, and drop and delete them. Sources
become ready early, late or never.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import ExpectedOperation, WrongEnd
from hoplite_mp._simulation.oracle.values import (
    SOURCES_MAX,
    Leaf,
    WrongBytes,
    add,
    delayed,
    make,
    make_once_more,
    sum_of,
)
from hoplite_mp._simulation.workloads.actors import begin_actor
from hoplite_mp._simulation.workloads.deadline import begin_newcomer, begin_timely
from hoplite_mp._simulation.workloads.durability import (
    begin_copies,
    begin_fetched,
    begin_nested,
    begin_remade,
)
from hoplite_mp._simulation.workloads.groups import begin_group, begin_letters, begin_rejoining
from hoplite_mp._simulation.workloads.programs import HANGS_S, PATIENCE_S, Programs
from hoplite_mp._simulation.workloads.remote import begin_rolled, begin_scarce, begin_shared
from hoplite_mp._simulation.workloads.sharing import begin_locks, begin_stream
from hoplite_mp._simulation.workloads.store_pressure import begin_full
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.virtual.host import VirtualHost

__all__ = ["Workload"]

KINDS = ("reduce", "reduce", "allreduce", "allreduce", "reduce_scatter", "broadcast", "gather",
         "allgather", "alltoall")  # fmt: skip


GROUPED_EVERY = 5  # one in so many reductions takes one source of each of two groups
# Factors for how often a kind of program occurs in a run.
SWARM = 0, 0, 1, 1, 3
# Share of runs with programs of only KINDS_FEW kinds, and the number of each kind in these, before
# the factors of SWARM.
FOCUSED, KINDS_FEW, FEW = 0.25, 3, (1, 2, 3)


class Workload(Programs):
    """The programs of one run, which ends when all of them have ended."""

    def begin(self) -> None:
        """Schedules the programs. A run omits some kinds and has more of others (swarm testing:
        Groce et al., ISSTA 2012), so that important combinations are not lost among many others."""
        chance = self.chance
        kinds: list[tuple[Callable[[], object], tuple[int, ...]]] = [
            (self._collective, (1, 2, 3)),
            (self._some_gets, (0, 1, 2)),
            (self._tasks, (0, 1, 2)),
            (partial(begin_group, self), (0, 1, 2)),
            (partial(begin_letters, self), (0, 0, 1)),
            (partial(begin_rejoining, self), (0, 0, 1)),
            (partial(begin_scarce, self), (0, 0, 1)),
            (partial(begin_remade, self), (0, 1, 2)),
            (partial(begin_copies, self), (0, 1, 2)),
            (partial(begin_fetched, self), (0, 1, 2)),
            (partial(begin_nested, self), (0, 1, 2)),
            (partial(begin_actor, self), (0, 1, 2)),
            (partial(begin_shared, self), (0, 0, 1)),
            (partial(begin_rolled, self), (0, 0, 1)),
            (partial(begin_full, self), (0, 1, 1)),
            (partial(begin_timely, self), (0, 0, 1)),
            (partial(begin_newcomer, self), (0, 0, 1)),
        ]
        if self.world.around.collectors:
            kinds += [
                (partial(begin_locks, self), (0, 0, 1)),
                (partial(begin_stream, self), (0, 0, 1)),
            ]
        if chance.random() < FOCUSED:
            kinds = [(begin, FEW) for begin, _ in chance.sample(kinds, KINDS_FEW)]
        for begin, counts in kinds:
            for _ in range(chance.choice(counts) * chance.choice(SWARM)):
                self.world.timeline.after(chance.random() * self.span_s, begin)

    def _source(self, hosts: list[VirtualHost], leaf: Leaf, name: str) -> tuple[VirtualHost, bool]:
        """Begins a program that makes a source, by putting it or by a task. Returns its host, and
        whether it is a task."""
        chance = self.chance
        late = chance.choice([0.0, 0.0, 0.0, 0.001, 0.03, 0.3]) * chance.random()
        by_task = chance.random() < 0.4
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
            if by_task and ref is not None:  # a program's tasks end with it
                c.wait([ref], timeout=HANGS_S)
            board.find(f"{name} is not needed")
            if f"{name} is not needed" not in board.ids:  # its users were too slow, and may fail
                self.world.struck.add(host.place)

        host = chance.choice(hosts)
        self.program(host, f"source {name}", body, self.holds_on(host, tasks=by_task))
        return host, by_task

    # -- kinds of programs -----------------------------------------------------------------------

    def _some_gets(self) -> None:
        """One object that programs on many hosts read at nearly the same time."""
        hosts, chance = self.hosts(), self.chance
        if not hosts:
            return
        many = chance.randint(1, len(hosts))
        leaf = Leaf(self.salt(), 0, max(1, self.items(many)))
        name = f"object {self._operations}"
        maker, by_task = self._source(hosts, leaf, name)
        users = [0]
        for host in chance.sample(hosts, many):
            users[0] += 1
            get = partial(self._get, name, leaf, users, chance.random() * 0.05)
            holds = self.holds_on(host, maker, tasks=by_task)
            self.program(host, f"get of {name}", get, holds)

    def _get(self, name: str, leaf: Leaf, users: list[int], late: float, c: Cluster) -> None:
        import time

        ref = self.ref(c, name)
        time.sleep(late)
        try:
            # First with a short timeout, then again.
            if ref is not None and self.chance.random() < 0.3:
                with contextlib.suppress(HopliteTimeoutError):
                    c.get(ref, timeout=self.chance.choice([0.0, 0.001, 0.05]))
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
        """A tree of tasks, with values and Futures as arguments, and tasks inside tasks."""
        hosts, chance = self.hosts(), self.chance
        if not hosts:
            return
        salt, width = self.salt(), chance.randint(1, 6)
        items = max(1, self.items(2 * width))
        leaves = [Leaf(salt, index, items) for index in range(width)]
        seconds = [chance.choice([0.0, 0.001, 0.05]) * chance.random() for _ in leaves]
        nested = chance.random() < 0.3
        cancels = chance.random() < 0.2

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
                raise WrongBytes(f"tasks {salt} made {value[:8]}")

        host = chance.choice(hosts)
        self.program(host, f"tasks {salt}", body, self.holds_on(host, tasks=True))

    def _collective(self) -> None:
        hosts, chance = self.hosts(), self.chance
        if not hosts:
            return
        kind = chance.choice(KINDS)
        count = 1 if kind == "broadcast" else chance.randint(1, min(2 * len(hosts), SOURCES_MAX))
        ordered = kind in ("reduce", "allreduce") and chance.random() < 0.25
        copies = count
        if kind not in ("reduce", "gather", "alltoall"):
            copies = len(hosts) * (count if kind == "allgather" else 2)
        items, salt = self.items(copies), self.salt()
        folds = kind in ("reduce", "allreduce", "reduce_scatter")
        fortran = kind in ("reduce", "allreduce") and items % 2 == 0 and chance.random() < 0.2
        leaves = tuple(Leaf(salt, i, items, ordered, fortran) for i in range(count))
        deadline = chance.choice([None, None, None, 0.0, 0.01, 0.3]) if folds else None
        if kind == "reduce_scatter":
            deadline = None
        num = chance.choice([count, chance.randint(1, count)])
        if kind not in ("reduce", "allreduce"):
            num = count
        groups: tuple[tuple[int, ...], ...] = ()
        if kind in ("reduce", "allreduce") and salt % GROUPED_EVERY == 0:
            odd, even = tuple(range(1, count, 2)), tuple(range(0, count, 2))
            groups = (odd, even) if odd else (even,)
            num = min(num, len(groups))
        number = self._operations
        least = 1 if deadline is not None else num
        operation = ExpectedOperation(number, kind, leaves, num, least, ordered, groups)
        names = [f"source {index} of {number}" for index in range(count)]
        makers = [chance.choice(hosts)] if chance.random() < 0.2 else hosts
        sources = [
            self._source(makers, leaf, name) for leaf, name in zip(leaves, names, strict=True)
        ]
        asker, to = chance.choice(hosts), self._to(kind, count, hosts)
        part = [host for host in hosts if to is None or f"h{host.number}" in to]
        part += [asker, *(host for host, _ in sources)]
        tasks = any(by_task for _, by_task in sources)
        ask = partial(self._ask, operation, names, deadline, to, part, tasks, asker)
        self.program(asker, f"{kind} {number}", ask, self.holds_on(*part, tasks=tasks))

    def _to(self, kind: str, count: int, hosts: list[VirtualHost]) -> list[str] | None:
        chance = self.chance
        some = [f"h{host.number}" for host in chance.sample(hosts, chance.randint(1, len(hosts)))]
        if kind == "alltoall":
            return some[:6]
        if kind in ("reduce", "gather"):
            some = some[:1]
        elif kind == "reduce_scatter":
            some = [f"h{chance.choice(hosts).number}" for _ in range(count)]
        return None if chance.random() < 0.5 else some

    def _ask(
        self,
        operation: ExpectedOperation,
        names: list[str],
        deadline: float | None,
        to: list[str] | None,
        took: list[VirtualHost],
        tasks: bool,
        asker: VirtualHost,
        c: Cluster,
    ) -> None:
        """took: the participating hosts. tasks: whether tasks make sources."""
        refs: list[Any] = []
        try:
            for name in names:
                refs.append(self.ref(c, name))
                if refs[-1] is None:  # that source will never be there
                    break
            else:
                self.hear_of(asker, to or ())
                self._run(operation, refs, deadline, to, took, tasks, c)
        finally:
            for name in names:
                self.board.publish(f"{name} is not needed", None)

    def _run(
        self,
        operation: ExpectedOperation,
        refs: list[Any],
        deadline: float | None,
        to: Any,
        took: list[VirtualHost],
        tasks: bool,
        c: Cluster,
    ) -> None:
        kind, what = operation.kind, f"{operation.kind} {operation.number}"
        one = to[0] if to else None
        if kind == "reduce":
            results = [c.reduce(refs, num=operation.num, deadline=deadline, to=one,
                                reproducible=operation.ordered,
                                one_of=operation.groups or None)]  # fmt: skip
        elif kind == "allreduce":
            results = [c.allreduce(refs, num=operation.num, deadline=deadline, to=to,
                                   reproducible=operation.ordered,
                                   one_of=operation.groups or None)]  # fmt: skip
        elif kind == "reduce_scatter":
            results = c.reduce_scatter(refs, to=to)
        else:
            self._copy(kind, refs, to, what, c)
            return
        dropped = -1
        if len(results) > 1 and self.chance.random() < 0.3:  # the others must still be readable
            dropped = self.chance.randrange(len(results))
            c.delete([results[dropped]])
        self._read_elsewhere(operation, results, dropped, took, tasks)
        for part, ref in enumerate(results):
            if part == dropped:
                continue
            value = self.value(c, ref, what)
            self.oracle.check_result(operation, part, len(results), np.asarray(value),
                                    ref.contributors or ())  # fmt: skip
        until = self.world.timeline.now + PATIENCE_S  # for all readers that have died together
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

    def _read_elsewhere(
        self,
        operation: ExpectedOperation,
        results: list[Any],
        dropped: int,
        took: list[VirtualHost],
        tasks: bool,
    ) -> None:
        """Begins programs that read the results, soon or late, except for one that is deleted."""
        hosts, chance = self.hosts(), self.chance
        for part, ref in enumerate(results):
            name = f"result {part} of {operation.number}"
            self.oracle.made_by[name] = f"{operation.kind} {operation.number}"
            self.board.publish(name, ref._id)
            for reader in range(READERS_MAX):
                done = f"{name} was read by {reader}"
                if hosts and part != dropped and chance.random() < 0.4:
                    late = chance.random() * self.span_s
                    read = partial(self._read, operation, name, part, len(results), late, done)
                    host = chance.choice(hosts)
                    holds = self.holds_on(host, *took, tasks=tasks)
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
