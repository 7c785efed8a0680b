"""The compiled core against the sequential reference: the same calls, the same state after each.

Several clients of one process share one control memory. Refs, pins, tasks, deaths and the node's
work come in any order that hypothesis finds; ids stay in play after their object has gone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hoplite_mp import _shm, _tasks
from tests.model.header import State
from tests.model.reference import Id, Outcome, Reference
from tests.support.shm_host import KIND_TASK, NODE, POOL, STATE, ShmHost

CLIENTS = 4  # slots 0 (the node) to 3
HEADERS = 3  # of each slot that the reference follows
SIZES = (40, 1000, 6000)  # inline, small block, big block
slots = st.integers(1, CLIENTS - 1)
any_slot = st.integers(0, CLIENTS - 1)
which = st.integers(0, 10**6)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.host = ShmHost()
        self.reference = Reference(dict.fromkeys(range(CLIENTS), HEADERS))
        self.clients: dict[int, Any] = {NODE: self.host.node}
        self.tasks: dict[int, _tasks.Tasks] = {NODE: self.host.node_tasks}
        self.queues = {NODE: self.host.queue}
        for slot in range(1, CLIENTS):
            self.clients[slot] = self.host.with_span(spans=2)
            assert self.clients[slot].slot == slot
            self.tasks[slot] = _tasks.Tasks(self.clients[slot])
            self.queues[slot] = self.tasks[slot].open_queue(POOL)
        self.dead: set[int] = set()
        self.known: list[tuple[Id, int]] = []  # every id ever, with its local id
        self.local: dict[Id, int] = {}
        self.places: dict[tuple[int, int], tuple[int, int]] = {}  # header -> where it is modelled
        self.free = {slot: list(range(HEADERS)) for slot in range(CLIENTS)}
        self.views: dict[tuple[int, Id], list[Any]] = {}
        self.unfinished: dict[Id, int] = {}  # claimed and not written yet -> slot of the writer
        self.doomed: set[Id] = set()  # ABORTED by a deletion, not by a cancel
        self.data: dict[Id, bytes] = {}

    def teardown(self) -> None:
        self.views.clear()
        for client in self.clients.values():
            client.close()
        self.host.close()

    # -- helpers -------------------------------------------------------------------------------

    def alive(self, slot: int) -> bool:
        return slot not in self.dead

    def pick(self, number: int) -> tuple[Id, int]:
        recent = self.known[-12:]
        return recent[number % len(recent)]

    def learn(self, id_: Id, oid: int) -> None:
        header = (oid >> 48, oid >> 32 & 0xFFFF)
        place = self.places.get(header, (id_.table, id_.index))
        if place != (id_.table, id_.index):  # the node gives empty tables of the dead away
            assert place[0] in self.dead, "a header that was not the next free one"
        self.places[header] = (id_.table, id_.index)
        self.known.append((id_, oid))
        self.local[id_] = oid

    def next_index(self, slot: int) -> int:
        return self.free[slot][-1]

    def took(self, slot: int) -> None:
        self.free[slot].pop()

    def content(self, oid: int, size: int) -> bytes:
        return (oid.to_bytes(8, "little") * (size // 8 + 1))[:size]

    def block(self, slot: int, size: int) -> int:
        if size > 4096:
            at = self.host.store.lease(size, slot)
        else:
            at = self.clients[slot].allocate(size)
            if not at:
                self.host.give_span(self.clients[slot])
                at = self.clients[slot].allocate(size)
        assert at
        return at

    def state(self, id_: Id) -> State | None:
        entry = self.reference.entry(id_)
        return None if entry is None else entry.state

    # -- puts ----------------------------------------------------------------------------------

    @rule(slot=slots, size=st.sampled_from(SIZES))
    def put(self, slot: int, size: int) -> None:
        if not self.alive(slot) or not self.free[slot]:
            return
        client = self.clients[slot]
        data = bytes([slot, len(self.known) % 256]) * (size // 2)
        if size <= _shm.INLINE_BYTES_MAX:
            oid = client.publish_inline(data, [], [], size, False)
        else:
            at = self.block(slot, size)
            client.write(at, data[:16], [data[16:]], [16])
            oid = client.publish(at, size, False)
        id_ = self.reference.new_put(slot, self.next_index(slot))
        assert self.reference.seal(slot, id_) is Outcome.OK
        self.took(slot)
        self.learn(id_, oid)
        self.data[id_] = data

    @rule(slot=slots)
    def begin_put(self, slot: int) -> None:
        """CLAIMED, like the result of an operation; written later, or never."""
        if not self.alive(slot) or not self.free[slot]:
            return
        oid = self.clients[slot].new(1, STATE["CLAIMED"], slot, 0)
        id_ = self.reference.new_put(slot, self.next_index(slot))
        self.took(slot)
        self.learn(id_, oid)
        self.unfinished[id_] = slot

    @rule(slot=any_slot, number=which, size=st.sampled_from(SIZES), failed=st.booleans())
    def finish(self, slot: int, number: int, size: int, failed: bool) -> None:
        """Seals a put, completes a task; settles instead if it was aborted."""
        mine = [id_ for id_, writer in self.unfinished.items() if writer == slot]
        if not mine or not self.alive(slot):
            return
        id_ = mine[number % len(mine)]
        del self.unfinished[id_]
        oid, client = self.local[id_], self.clients[slot]
        data = self.content(oid, size)
        at = 0
        if size <= _shm.INLINE_BYTES_MAX:
            client.bind_inline(oid, data, [], [], size, False)
        else:
            at = self.block(slot, size)
            client.write(at, data, [], [])
            client.bind(oid, at, size, False)
        was = self.state(id_)
        expected = self.reference.complete(slot, id_, failed=failed)
        got = self.tasks[slot].finish(oid, failed)
        assert got == (expected is Outcome.OK)
        if got:
            self.data[id_] = data
        else:
            assert was is State.ABORTED
            if at:
                client.give_back(at, oid)
            assert self.tasks[slot].settle(oid)

    # -- holders -------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(slot=any_slot, number=which)
    def acquire(self, slot: int, number: int) -> None:
        if not self.alive(slot):
            return
        id_, oid = self.pick(number)
        expected = self.reference.acquire(slot, id_)
        assert self.clients[slot].acquire(oid) == (expected is Outcome.OK)

    @precondition(lambda self: self.known)
    @rule(slot=any_slot, number=which)
    def release(self, slot: int, number: int) -> None:
        if not self.alive(slot):
            return
        held = [
            (id_, oid)
            for id_, oid in self.known
            if (entry := self.reference.entry(id_)) is not None and entry.ref_counts[slot]
        ]
        if held:
            id_, oid = held[number % len(held)]
            assert self.reference.release(slot, id_) is Outcome.OK
            self.clients[slot].release(oid)

    @precondition(lambda self: self.known)
    @rule(slot=any_slot, number=which)
    def pin(self, slot: int, number: int) -> None:
        """A view of a payload. Inline payloads are copied: their pin ends with the call."""
        if not self.alive(slot):
            return
        id_, oid = self.pick(number)
        entry = self.reference.entry(id_)
        got = self.clients[slot].view(oid)
        if entry is not None and entry.state is State.FAILED:  # an error is read like a value
            assert not isinstance(got, int)
            assert entry.state is State.FAILED
            if self.data.get(id_):
                assert bytes(got) == self.data[id_]
            return
        if entry is not None and entry.pin_counts[slot] and entry.state is State.DELETED:
            assert got == STATE["DELETED"]  # who has a view keeps it; nobody gets another
            return
        expected = self.reference.pin(slot, id_)
        if expected is not Outcome.OK:
            assert isinstance(got, int)
            return
        assert bytes(got) == self.data[id_]
        if isinstance(got, bytes):
            self.reference.unpin(slot, id_)
        else:
            self.views.setdefault((slot, id_), []).append(got)

    @precondition(lambda self: self.views)
    @rule(number=which)
    def unpin(self, number: int) -> None:
        keys = list(self.views)
        slot, id_ = key = keys[number % len(keys)]
        self.views[key].pop()
        if not self.views[key]:
            del self.views[key]
        assert self.reference.unpin(slot, id_) is Outcome.OK

    # -- tasks ---------------------------------------------------------------------------------

    @rule(slot=slots, retries=st.integers(0, 2), waiting=st.booleans())
    def task(self, slot: int, retries: int, waiting: bool) -> None:
        if not self.alive(slot) or not self.free[slot]:
            return
        oid = self.clients[slot].new(KIND_TASK, STATE["WAITING"], 0, POOL)
        posted = self.tasks[slot].submit(
            oid, 0, b"x", 0, retries, 0, 0, b"t", self.queues[slot], not waiting
        )
        assert posted is not waiting
        id_ = self.reference.new_task(
            slot, self.next_index(slot), tries=retries + 1, waiting=waiting
        )
        self.took(slot)
        self.learn(id_, oid)

    @precondition(lambda self: self.known)
    @rule(number=which)
    def make_ready(self, number: int) -> None:
        id_, oid = self.pick(number)
        if self.alive(id_.table):
            self.reference.make_ready(id_.table, id_)
            assert self.tasks[id_.table].post(oid, self.queues[id_.table])

    @rule(slot=slots)
    def claim_by_hint(self, slot: int) -> None:
        if not self.alive(slot):
            return
        oid = self.tasks[slot].next(POOL, 0)
        queued = [place for place, entry in self.entries() if entry.state is State.QUEUED]
        if not oid:
            assert not queued, "a queued task without a hint"
            return
        id_ = next(i for i, local in reversed(self.known) if local == oid)
        assert self.reference.claim(slot, id_.table, id_.index) is Outcome.OK
        self.unfinished[id_] = slot

    @precondition(lambda self: self.known)
    @rule(slot=slots, number=which)
    def claim(self, slot: int, number: int) -> None:
        """By id, as a worker does that runs in place what it waits for."""
        id_, oid = self.pick(number)
        if not self.alive(slot):
            return
        possible = self.state(id_) is State.QUEUED
        assert self.tasks[slot].claim(oid) == possible
        if possible:
            assert self.reference.claim(slot, id_.table, id_.index) is Outcome.OK
            self.unfinished[id_] = slot

    @precondition(lambda self: self.known)
    @rule(number=which, force=st.booleans())
    def cancel(self, number: int, force: bool) -> None:
        id_, oid = self.pick(number)
        if not self.alive(id_.table):
            return
        was = self.state(id_)
        act = self.reference.abort if force else self.reference.cancel
        expected = act(id_.table, id_)
        got = self.tasks[id_.table].cancel(oid, force)
        assert (got != 0) == (expected is Outcome.OK)
        assert (got == 2) == (expected is Outcome.OK and was is State.CLAIMED)

    @precondition(lambda self: self.known)
    @rule(slot=any_slot, number=which)
    def delete(self, slot: int, number: int) -> None:
        id_, oid = self.pick(number)
        pending = (State.WAITING, State.QUEUED, State.CLAIMED)
        state = self.state(id_)
        if not self.alive(slot) or (state in pending and slot != id_.table):
            return
        expected = self.reference.delete(slot, id_)
        got = self.clients[slot].delete(oid)
        assert (got == 1) == (expected is Outcome.OK)
        if state is State.CLAIMED and got:
            self.doomed.add(id_)

    # -- the owner and the node ----------------------------------------------------------------

    @rule(slot=any_slot)
    def collect(self, slot: int) -> None:
        if not self.alive(slot):
            return
        if slot == NODE:
            for dead in sorted(self.dead):
                self.reference.collect(dead)
        else:
            # the order in which headers were freed is the order of their indices
            gained = sorted(self.reference.collect(slot), key=lambda i: self.header(slot, i))
            self.free[slot] += gained
        self.clients[slot].collect()

    def header(self, slot: int, index: int) -> tuple[int, int]:
        return next(h for h, place in self.places.items() if place == (slot, index))

    @precondition(lambda self: self.known)
    @rule(number=which, stay=st.booleans())
    def spill(self, number: int, stay: bool) -> None:
        id_, oid = self.pick(number)
        header = self.host.node.inspect(oid)
        if self.state(id_) is not State.SEALED or not header["block"]:
            return
        expected = self.reference.spill(id_)
        store = self.host.store
        got = store.spill_one(oid, header["block"], header["size"])
        assert got == (expected is Outcome.OK)
        store.take_returns()

    @precondition(lambda self: self.known)
    @rule(number=which)
    def restore(self, number: int) -> None:
        id_, oid = self.pick(number)
        expected = self.reference.restore(id_)
        assert (self.host.store.restore(oid) is True) == (expected is Outcome.OK)

    @precondition(lambda self: self.known)
    @rule(number=which)
    def delete_while_moving(self, number: int) -> None:
        id_, oid = self.pick(number)
        entry = self.reference.entry(id_)
        if entry is None or entry.state is not State.SEALED or entry.pins:
            return
        assert self.host.node.spill_begin(oid)
        assert self.clients[NODE].delete(oid) == -1
        assert self.clients[NODE].view(oid) == STATE["SPILLING"]
        self.host.node.spill_abort(oid)

    @precondition(lambda self: len(self.known) > 6)
    @rule(slot=slots)
    def die(self, slot: int) -> None:
        """No call of this client any more, then the node's sweep."""
        if len(self.dead) == CLIENTS - 2 or not self.alive(slot):
            return
        self.clients[slot].close()
        self.views = {key: views for key, views in self.views.items() if key[0] != slot}
        self.dead.add(slot)
        self.unfinished = {i: writer for i, writer in self.unfinished.items() if writer != slot}
        # the node repeats what is owed to others only once
        self.reference.sweep(slot)
        for dead in sorted(self.dead):
            self.reference.collect(dead)
        self.host.sweep(slot)

    # -- after every step ----------------------------------------------------------------------

    def entries(self) -> list[tuple[tuple[int, int], Any]]:
        return list(self.reference.entries.items())

    @invariant()
    def agree(self) -> None:
        places = {place: header for header, place in self.places.items()}
        for (slot, index), entry in self.entries():
            header = places.get((slot, index))
            if header is None:
                assert entry.state is State.FREE
                continue
            oid = self.latest(slot, index)
            real = self.host.node.inspect(oid)
            expected = entry.state.name
            if expected == "CANCELLED" and self.was_deleted(slot, index, entry):
                expected = "DELETED"
            assert real["state"] == expected, f"{real}, expected {entry}"
            assert set(real["refs"]) == entry.refs, f"{real}, expected {entry}"
            assert set(real["pins"]) == entry.pins, f"{real}, expected {entry}"
            if real["state"] != "FREE":
                assert real["id"] == oid

    def latest(self, slot: int, index: int) -> int:
        return next(o for i, o in reversed(self.known) if (i.table, i.index) == (slot, index))

    def was_deleted(self, slot: int, index: int, entry: Any) -> bool:
        return Id(slot, index, entry.generation) in self.doomed


TestConformance = Machine.TestCase
TestConformance.settings = settings(
    max_examples=30,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
