"""Tasks on other hosts: shared arguments, results with refs, resources that few hosts have.

These tasks need a resource that the submitting host lacks, so arguments, results and refs inside
results are transferred. Some results depend on the number of runs of the task, so the checks detect
readers that get different values.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import (
    Leaf,
    delayed,
    make_once_more,
    make_with_refs,
    pattern,
    rolled,
    scaled,
)
from hoplite_mp._simulation.workloads.programs import DEATHS_MAX, HANGS_S

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.oracle.oracle import Oracle
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["RESOURCE", "begin_rerun", "begin_resource_tasks", "begin_shared"]


READERS_MAX = 3
# Number of 8-byte items beside the refs. A result of more than 64 KiB stays on the remote host.
SIZES = 0, 100, 20_000


def _places(
    work: Programs, hosts: list[VirtualHost]
) -> tuple[list[VirtualHost], list[VirtualHost]]:
    """Returns (the hosts without the resource, the hosts with it)."""
    with_resource = [host for host in hosts if host.config.resources]
    return [host for host in hosts if host not in with_resource], with_resource


def _survives(oracle: Oracle, others: list[VirtualHost]) -> bool:
    """Whether the result must be readable in the end: a host on which the task may run is alive,
    and the task has retries left after the faults so far."""
    world = oracle.world
    disturbed = world.cuts or world.resets or world.stops or world.managers or oracle.small_stores
    survivable = len(world.lost) + world.killed <= DEATHS_MAX
    return not disturbed and survivable and any(host.alive for host in others) and not world.leaving


def _stays(work: Programs, *users: VirtualHost) -> bool:
    """Whether a task's objects, which are lost with its host, must be readable in the end."""
    return work.no_errors_on(*users, *_places(work, work.world.incarnations)[1])()


def begin_shared(work: Programs) -> None:
    """Starts a program whose tasks share an argument that only they hold. It drops some of their
    results, and reads the rest. Alternatively, the program submits one task, which puts objects on
    its host and returns refs to them; this program, or one on another host, reads them."""
    (senders, others), rng = _places(work, work.hosts()), work.rng
    if not (senders and others):
        return
    salt, width = work.salt(), rng.randint(2, 4)
    leaf = Leaf(salt, 0, max(1, work.items(2 * width)))
    dropped = rng.sample(range(width), rng.randint(0, width - 1))
    late = [rng.choice([0.0, 0.5, 1.0]) * rng.random() * work.span_s for _ in range(2)]
    refs = rng.random() < 0.5
    sender = rng.choice(senders)
    if refs:
        _begin_refs(work, leaf, late, sender)
        return
    body = partial(_share, work, leaf, width, dropped, late)
    work.program(sender, f"shared {salt}", body, holds=partial(_survives, work.oracle, others))


def _begin_refs(work: Programs, leaf: Leaf, late: list[float], sender: VirtualHost) -> None:
    rng, name = work.rng, f"shared {leaf.salt}"
    items = rng.choice(SIZES)  # a large result stays on its host until it is read
    reader = rng.choice([None, None, *work.hosts()])

    def send(c: Cluster) -> None:
        made: Any = None
        try:
            remote = c.options(resources={RESOURCE: 1})
            made = remote.submit(make_with_refs, [leaf, leaf], items).ref
        finally:
            work.board.publish(name, None if made is None else made._id)
        if reader is None:
            read(c, made)
        else:  # this program holds the result until the other program has read it
            c.wait([made], timeout=work.span_s)
            work.board.find(f"{name} is read")

    def read(c: Cluster, made: Any) -> None:
        import time

        time.sleep(late[0])
        value, inner = work.value(c, made, name)
        del made
        work.board.publish(f"{name} is read", None)
        time.sleep(late[1])
        work.oracle.check_value(value, pattern(items), name)
        for one in inner:
            work.oracle.check_leaf(leaf, work.value(c, one, name))

    def receive(c: Cluster) -> None:
        try:
            ref = work.ref(c, name)
            if ref is not None:
                read(c, ref)
        finally:
            work.board.publish(f"{name} is read", None)

    if reader is None:
        work.program(sender, name, send, holds=partial(_stays, work, sender))
    else:
        work.program(sender, name, send)
        holds = partial(_stays, work, sender, reader)
        work.program(reader, f"reader of {name}", receive, holds=holds)


def _share(
    work: Programs,
    leaf: Leaf,
    width: int,
    dropped: list[int],
    late: list[float],
    c: Cluster,
) -> None:
    import time

    remote = c.options(resources={RESOURCE: 1})
    name = f"shared {leaf.salt}"
    argument: Any = c.put(leaf.array())
    results: list[Any] = [remote.submit(scaled, argument, factor).ref for factor in range(width)]
    # A process with a collector releases the argument when the tasks are done. Then results that
    # are lost later cannot be reconstructed.
    if not work.world.environment.collectors:
        del argument
    time.sleep(late[0])
    for index in dropped:
        results[index] = None
    time.sleep(late[1])
    for factor, ref in enumerate(results):
        if ref is not None:
            work.oracle.check_value(work.value(c, ref, name), leaf.array() * factor, name)


def begin_rerun(work: Programs) -> None:
    """Starts programs that read the result of one task, which depends on how often the task has
    run. As long as any program holds the result, all programs must read the same value. Some hosts
    on which the task may run are killed."""
    (senders, others), rng = _places(work, work.hosts()), work.rng
    if not (senders and others):
        return
    leaf = Leaf(work.salt(), 1, max(1, work.items(4)))
    name = f"rolled {leaf.salt}"
    readers, seconds = rng.randint(1, READERS_MAX), rng.choice([0.0, 0.1])
    dies = rng.random() * work.span_s
    for host in rng.sample(others, min(len(others), rng.choice([0, 0, 1, 1, 2]))):
        work.world.timeline.after(dies, work.world.end, host, "it dies")
        dies += seconds + 0.02 * rng.random()
    users = [readers + 1]

    def send(c: Cluster) -> None:
        ref = None
        try:
            ref = c.options(resources={RESOURCE: 1}).submit(rolled, leaf, seconds).ref
        except ValueError as error:
            if NO_SUCH_NODE not in str(error):
                raise
        work.board.publish(name, None if ref is None else ref._id)
        if ref is not None:
            c.wait([ref], timeout=work.span_s)
            _check_rerun(work, leaf, name, 0.0, users, ref, c)

    def read(late: float, c: Cluster) -> None:
        ref = work.ref(c, name)
        if ref is not None:
            _check_rerun(work, leaf, name, late, users, ref, c)

    work.program(rng.choice(senders), name, send)
    for _ in range(readers):
        late = rng.choice([0.0, 0.1, 1.0]) * rng.random() * work.span_s
        work.program(rng.choice(work.hosts()), f"reader of {name}", partial(read, late))


def _check_rerun(
    work: Programs, leaf: Leaf, name: str, late: float, users: list[int], ref: Any, c: Cluster
) -> None:
    import time

    try:
        time.sleep(late)
        value = work.value(c, ref, f"reader of {name}")
        run = int(value[0] - leaf.array()[0])
        work.oracle.check_value(value, leaf.array() + run, name)
        if not work.oracle.small_stores:  # in small stores a host may have to drop its copy
            work.oracle.note_call((name, 0), (run,))
    finally:
        users[0] -= 1
        if not users[0]:
            work.board.publish(f"{name} is not needed", None)
    work.board.find(f"{name} is not needed")  # this program holds the value until then


# Tasks that need a resource that only some hosts have, while hosts join and leave.
#
# A task that waits for a resource starts when the resource is free on a host, and fails when no
# host has the resource any more. Objects that `wait` returns as ready stay ready even if hosts die.


RESOURCE = "gpu"
TASKS_MAX = 6
NO_SUCH_NODE = "no node of this cluster"


def begin_resource_tasks(work: Programs) -> None:
    """Starts a program that submits tasks with the resource, waits for all, and reads the
    results."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    salt, count = work.salt(), rng.randint(1, TASKS_MAX)
    items = work.items(2 * count)
    leaves = [Leaf(salt, index, items) for index in range(count)]
    seconds = [rng.choice([0.0, 0.01, 0.2]) * rng.random() for _ in leaves]
    retries = rng.choice([0, 3, 3])
    body = partial(_submit, work, leaves, seconds, retries)
    work.program(rng.choice(hosts), f"scarce {salt}", body)


def _submit(
    work: Programs, leaves: list[Leaf], seconds: list[float], retries: int, c: Cluster
) -> None:
    view = delayed(c, leaves[0].salt).options(resources={RESOURCE: 1}, retries=retries)
    futures: list[Any] = []
    for pair in zip(leaves, seconds, strict=True):
        try:
            futures.append(view.submit(make_once_more, *pair))
        except ValueError as error:
            if NO_SUCH_NODE not in str(error):
                raise
            return  # no node has the resource at present
    ready, pending = c.wait(futures, timeout=HANGS_S)
    if pending:
        raise WrongEnd(f"{len(pending)} of {len(futures)} tasks that need {RESOURCE} hang")
    for leaf, future in zip(leaves, ready, strict=True):
        if not future.done():
            raise WrongEnd(f"{leaf} was returned as ready by wait(), but is not ready")
        work.oracle.check_leaf(leaf, work.value(c, future, f"scarce {leaf.salt}"))
