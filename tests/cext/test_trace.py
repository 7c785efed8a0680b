"""What clients run and have run, as their node reads it while they write."""

from __future__ import annotations

import os
import signal
import time

from hoplite_mp import _tasks
from hoplite_mp._protocol.diagnostics import EVENT
from tests.support.shm_host import KIND_TASK, NODE, POOL, STATE, ShmHost

DONE, FAILED, CANCELLED = 1, 2, 3
MOST = _tasks.TRACED_EVENTS_MAX


class Party:
    """A client that runs tasks, and the node's look at it."""

    def __init__(self, host: ShmHost) -> None:
        self.client = host.client()
        self.slot = self.client.slot
        self.tasks = _tasks.Tasks(self.client)
        self.queue = self.tasks.open_queue(POOL)
        self.trace = _tasks.Trace(host.node_tasks)

    def task(self, name: bytes = b"t") -> int:
        oid = self.client.new(KIND_TASK, STATE["CLAIMED"], self.slot, POOL)
        self.tasks.submit(oid, 0, b"", 0, 0, 0, 0, name, self.queue, False)
        return oid

    def ended(self) -> list[tuple[int, int, bytes]]:
        """(id, outcome, name) of what has ended since the last look."""
        data, dropped = self.trace.take(self.slot)
        assert dropped == 0
        return [(e[0], e[4], e[7].rstrip(b"\0")) for e in EVENT.iter_unpack(data)]

    def open(self) -> list[int]:
        return [event[0] for event in EVENT.iter_unpack(self.trace.open(self.slot))]


def test_events_have_the_size_that_the_vocabulary_says() -> None:
    assert EVENT.size == _tasks.EVENT_BYTES


def test_nothing_is_written_while_nobody_traces(host: ShmHost) -> None:
    party = Party(host)
    oid = party.task()
    assert not party.tasks.tracing
    party.tasks.end(party.tasks.begin(oid), False)
    party.trace.start()
    assert party.tasks.tracing
    assert party.ended() == []


def test_tasks_inside_one_another(host: ShmHost) -> None:
    party = Party(host)
    outer, inner = party.task(b"outer"), party.task(b"x" * 40)
    before = time.monotonic_ns()
    party.tasks.begin(outer)  # before the trace
    party.trace.start()
    around = party.tasks.begin(inner)
    assert party.open() == [outer, inner]
    party.tasks.end(around, True)
    party.tasks.end(0, False)
    assert party.open() == []
    data, _ = party.trace.take(party.slot)
    first, second = EVENT.iter_unpack(data)
    assert (first[0], first[4], first[5], first[7]) == (inner, FAILED, 2, b"x" * 32)
    assert (second[0], second[4], second[5]) == (outer, DONE, 1)
    assert before <= second[1] <= first[1] <= first[2] <= second[2] <= time.monotonic_ns()


def test_a_task_that_was_aborted_has_ended_as_cancelled(host: ShmHost) -> None:
    party = Party(host)
    party.trace.start()
    oid = party.task()
    before = party.tasks.begin(oid)
    assert party.tasks.cancel(oid, True) == 2
    assert not party.tasks.finish(oid, False)
    party.tasks.settle(oid)
    party.tasks.end(before, True)
    assert party.ended() == [(oid, CANCELLED, b"t")]


def test_what_ended_before_a_trace_is_not_in_it(host: ShmHost) -> None:
    party = Party(host)
    party.trace.start()
    party.tasks.end(party.tasks.begin(party.task()), False)
    party.trace.stop()
    party.trace.start()
    assert party.ended() == []


def test_the_oldest_go_when_nobody_takes_them(host: ShmHost) -> None:
    party = Party(host)
    party.trace.start()
    oid = party.task()
    for _ in range(MOST + 100):
        party.tasks.end(party.tasks.begin(oid), False)
    assert party.trace.waits(party.slot)
    data, dropped = party.trace.take(party.slot)
    kept = len(data) // EVENT.size
    assert kept + dropped == MOST + 100
    assert kept >= MOST - 1  # one place is where its client may be writing
    ends = [event[2] for event in EVENT.iter_unpack(data)]
    assert ends == sorted(ends)
    assert not party.trace.waits(party.slot)


def test_deeper_than_the_stack_is_not_shown_but_counted_right(host: ShmHost) -> None:
    party = Party(host)
    oids = [party.task() for _ in range(300)]
    for oid in oids:
        party.tasks.begin(oid)
    assert party.open() == oids[:256]
    party.trace.start()
    for before in [0, *oids][:-1][::-1]:
        party.tasks.end(before, False)
    assert party.open() == []
    assert [one[0] for one in party.ended()] == oids[:256][::-1]


def test_group_calls(host: ShmHost) -> None:
    party = Party(host)
    party.tasks.note_group_call(b"allreduce g", 3, 1, 5, False, 8)
    party.trace.start()
    party.tasks.note_group_call(b"allreduce g", 4, 1, 0, False, 8)  # it began before anybody traced
    party.tasks.note_group_call(b"allreduce g", 5, 1, 7, True, 1 << 40)
    data, _ = party.trace.take(party.slot)
    ((call, begin, _, kind, outcome, _, rank, name, nbytes, _),) = EVENT.iter_unpack(data)
    assert (call, begin, kind, outcome, rank) == (5, 7, 1, FAILED, 1)
    assert name.rstrip(b"\0") == b"allreduce g"
    assert nbytes == 1 << 40


def test_a_reader_beside_a_writer_sees_each_event_once(host: ShmHost) -> None:
    """The writer is a process of its own, faster than the reader at times; what is not seen is
    counted, what is seen is whole: a task's name is made of its number."""
    slot = host.node.register(0, 2, POOL)
    trace = _tasks.Trace(host.node_tasks)
    trace.start()
    rounds, names = 60_000, 50
    pid = os.fork()
    if not pid:
        client = host.client(slot)
        tasks = _tasks.Tasks(client)
        queue = tasks.open_queue(POOL)
        oids = []
        for _ in range(names):
            oid = client.new(KIND_TASK, STATE["CLAIMED"], slot, POOL)
            tasks.submit(oid, 0, b"", 0, 0, 0, 0, b"%d" % (oid >> 32) * 4, queue, False)
            oids.append(oid)
        for i in range(rounds):
            tasks.end(tasks.begin(oids[i % names]), False)
        os._exit(0)
    seen = lost = 0
    last_end = 0
    over = False
    while True:
        data, dropped = trace.take(slot)
        lost += dropped
        for oid, begin, end, _, outcome, depth, _, name, *_ in EVENT.iter_unpack(data):
            seen += 1
            assert last_end <= begin <= end
            assert (outcome, depth) == (DONE, 1)
            assert name.rstrip(b"\0") == b"%d" % (oid >> 32) * 4
            last_end = end
        for event in EVENT.iter_unpack(trace.open(slot)):
            assert event[7].rstrip(b"\0") == b"%d" % (event[0] >> 32) * 4
        if over:
            break
        over = os.waitpid(pid, os.WNOHANG)[0] == pid
    assert seen + lost == rounds
    assert seen > 0


def test_what_a_killed_client_ran_is_still_there(host: ShmHost) -> None:
    slot = host.node.register(0, 2, POOL)
    trace = _tasks.Trace(host.node_tasks)
    trace.start()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        client = host.client(slot)
        tasks = _tasks.Tasks(client)
        queue = tasks.open_queue(POOL)
        oids = [client.new(KIND_TASK, STATE["CLAIMED"], slot, POOL) for _ in range(2)]
        for oid in oids:
            tasks.submit(oid, 0, b"", 0, 0, 0, 0, b"t", queue, False)
        tasks.end(tasks.begin(oids[0]), False)
        tasks.begin(oids[1])
        os.write(write, b"%d %d" % tuple(oids))
        time.sleep(60)
    first, second = map(int, os.read(read, 100).split())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert [event[0] for event in EVENT.iter_unpack(trace.open(slot))] == [second]
    assert [event[0] for event in EVENT.iter_unpack(trace.take(slot)[0])] == [first]
    host.node.unregister(slot)
    assert host.node.register(0, 2, POOL) == slot  # the next one begins with an empty stack
    assert trace.open(slot) == b""


def test_tasks_by_state(host: ShmHost) -> None:
    party = Party(host)
    waiting = [party.client.new(KIND_TASK, STATE["WAITING"], 0, POOL) for _ in range(3)]
    before = time.monotonic_ns()
    for oid in waiting:
        party.tasks.submit(oid, 0, b"", 0, 0, 0, 0, b"t", party.queue, False)
    assert party.tasks.unfinished(STATE["WAITING"], 2) == (waiting[:2], 3)
    party.tasks.post(waiting[0], party.queue)
    assert party.tasks.unfinished(STATE["WAITING"], 9) == (waiting[1:], 2)
    assert party.tasks.unfinished(STATE["QUEUED"], 9) == (waiting[:1], 1)
    assert before <= party.tasks.submitted_ns(waiting[0]) <= time.monotonic_ns()


def test_a_sleeper_says_what_it_sleeps_for(host: ShmHost) -> None:
    slot = host.node.register(0, 2, POOL)
    oid = host.node.new(KIND_TASK, STATE["CLAIMED"], NODE, POOL)
    pid = os.fork()
    if not pid:
        client = host.client(slot)
        tasks = _tasks.Tasks(client)
        tasks.wait([oid], 1, time.monotonic_ns() + 60 * 10**9, False)
        os._exit(0)
    end = time.monotonic() + 20
    while host.node.client_info(slot)["waiting_id"] != oid:
        assert time.monotonic() < end
        time.sleep(0.001)
    info = host.node.client_info(slot)
    assert info["waiting_n"] == 1
    assert 0 < info["waiting_ns"] <= time.monotonic_ns()
    host.node.bind_inline(oid, b"x" * 16, [], [], 16, False)
    assert host.node_tasks.finish(oid, False)
    os.waitpid(pid, 0)
    assert host.node.client_info(slot)["waiting_id"] == 0
