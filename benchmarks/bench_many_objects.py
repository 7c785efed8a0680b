"""The cost of one link, one call and one turn of the loop with many others open.

Each row is the cost with 100 000 of them divided by the cost with 1 000, in the same process."""

from __future__ import annotations

import time

from benchmarks.common import Row, median, seconds

FEW, MANY = 1_000, 100_000
WANTED = 1.3
CALLS = 200
ROUNDS, CALLS_A_ROUND = 25, 2_000


def increment(x):
    return x + 1


def times_many(title, few, many, unit="s"):
    """The row of a cost in seconds."""
    return Row(title, many, unit, f"with {FEW}", few, ratio=many / few, wanted=WANTED)


def seconds_a_link(cluster, links):
    """A chain in which each task needs the one before, all sent before the first has ended."""
    began = time.perf_counter()
    last = cluster.submit(increment, 0)
    for _ in range(links - 1):
        last = cluster.submit(increment, last)
    assert last.result() == links
    return (time.perf_counter() - began) / links


def bench_links_of_a_chain(benchmark, cluster, rounds, record):
    few, many = [], []

    def call():
        few.append(median([seconds_a_link(cluster, FEW) for _ in range(5)]))
        many.append(seconds_a_link(cluster, MANY))

    benchmark.pedantic(call, rounds=rounds(3, 1), warmup_rounds=1)
    record(times_many(f"a link of a chain of {MANY}", median(few[1:]), median(many[1:])))


def of_each_call(cluster):
    """Medians of single calls: what they cost while whatever else is held is held."""
    refs = [cluster.put(n) for n in range(CALLS)]
    return {
        "stats()": median([seconds(cluster.stats) for _ in range(CALLS)]),
        "put of a number": median([seconds(lambda: cluster.put(7)) for _ in range(CALLS)]),
        "get of a number": median([seconds(lambda ref=ref: cluster.get(ref)) for ref in refs]),
        "submit → result": median(
            [seconds(cluster.submit(increment, n).result) for n in range(CALLS)]
        ),
    }


def bench_calls_beside_many_refs(benchmark, cluster, rounds, record):
    """The same calls of a driver that holds few refs, then many."""
    few, many = [], []

    def call():
        few.append(held(FEW))
        many.append(held(MANY))

    def held(count):
        refs = [cluster.put(n) for n in range(count)]
        cost = of_each_call(cluster)
        del refs
        return cost

    benchmark.pedantic(call, rounds=rounds(5, 1), warmup_rounds=1)
    for title in few[0]:
        below, above = (median([one[title] for one in side[1:]]) for side in (few, many))
        record(times_many(f"{title} beside {MANY} refs", below, above))


def bench_many_refs_at_once(benchmark, cluster, rounds, record):
    """One `get` and one `wait` of all refs; the cost of each ref."""
    costs = {FEW: ([], []), MANY: ([], [])}

    def call():
        for count, (gets, waits) in costs.items():
            refs = [cluster.put(n) for n in range(count)]
            gets.append(of_each(cluster.get, refs))
            waits.append(of_each(cluster.wait, refs))

    def of_each(look, refs):
        times = max(1, 20 * FEW // len(refs))
        return median([seconds(lambda: look(refs)) for _ in range(times)]) / len(refs)

    benchmark.pedantic(call, rounds=rounds(5, 1), warmup_rounds=1)
    for place, title in enumerate(("get", "wait")):
        below, above = (median(costs[count][place][1:]) for count in (FEW, MANY))
        record(times_many(f"{title} of {MANY} refs, each", below, above))


def of_each_of_many(few, many):
    """Seconds of each of two calls that take less than a microsecond: rounds of many calls, of
    both in turn, because one call is shorter than what the clock and the caches add to it."""
    costs = [], []
    for _ in range(ROUNDS):
        for call, found in zip((few, many), costs, strict=True):
            found.append(seconds(lambda call=call: [call() for _ in range(CALLS_A_ROUND)]))
    return [median(found) / CALLS_A_ROUND for found in costs]


def bench_turns_beside_objects_of_other_hosts(benchmark, record):
    """A pass of the node over what has changed, with so many objects of other hosts in its care."""
    from hoplite_mp._common import ids
    from tests.support.node_hosts import Network
    from tests.support.shm_host import STATE

    kind_task, node_slot = 2, 0

    def elsewhere(network, count):
        side = network.sides[0]
        for _ in range(count):
            oid = side.party.new(kind_task, STATE["CLAIMED"], node_slot, 0)
            assert side.node.finish_elsewhere(oid, 1000, False)
            side.remote_objects.add(oid, ids.pack_id(side.host_id, oid), 1000, (1,), b"")
        return side.remote_objects.purge

    def call():
        networks = [Network(2), Network(2)]
        try:
            turns = [elsewhere(*one) for one in zip(networks, (FEW, MANY), strict=True)]
            return of_each_of_many(*turns)
        finally:
            for network in networks:
                network.close()

    few, many = benchmark.pedantic(call, rounds=1)
    record(times_many(f"a node's turn beside {MANY} objects elsewhere", few, many))


def bench_queued_tasks_beside_many_objects(benchmark, record):
    """What is asked when an actor begins or ends: which calls are queued for it. Ten are, beside so
    many objects, and as many tasks of another pool, of the same process."""
    from hoplite_mp import _tasks
    from tests.support.shm_host import STATE, ShmHost

    kind_put, kind_task, calls, common, actor = 1, 2, 10, 0, 7

    def queued(host, count):
        party = host.client()
        tasks = _tasks.Tasks(party)
        queues = {pool: tasks.open_queue(pool) for pool in (common, actor)}
        for number in range(count):
            party.new(kind_put, STATE["SEALED"], 0, 0)
            pool = actor if number % (count // calls) == 0 else common
            oid = party.new(kind_task, STATE["WAITING"], 0, pool)
            tasks.submit(oid, 0, b"", 0, 0, 0, 0, b"f", queues[pool], False, 0, 0)
        assert len(host.node.queued_in(actor, True)) == calls
        return lambda: host.node.queued_in(actor, True)

    def call():
        hosts = [ShmHost(), ShmHost()]
        try:
            return of_each_of_many(*map(queued, hosts, (FEW, MANY)))
        finally:
            for host in hosts:
                host.close()

    few, many = benchmark.pedantic(call, rounds=1)
    record(times_many(f"the calls of an actor beside {MANY} objects and tasks", few, many))
