"""Real SIGKILLs: a client is killed at a random instant, swept, and nothing of it may be left.

Two players work against each other on one host without a node process: one lives through all the
rounds, the other is killed in every round. The test is the node. It sweeps while the living one
goes on, then stops it and looks at every header, every block and every payload.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from tests.cext.player import BIG_BYTES, BLOCKS, Board, Player, check_payload
from tests.support.shm_host import LEASED, NODE, POOL, STATE, ShmHost, describe

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS_OF_A_HOST = 50
SETTLED = ("SEALED", "FAILED", "CANCELLED", "DELETED", "SPILLED")


def fork(run: Callable[[], None]) -> int:
    """The process id of a child that does this and no more."""
    with warnings.catch_warnings():  # threads of BLAS exist in this process; no child uses it
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Living:
    """The player that lives, in its own process, at the end of two pipes."""

    def __init__(self, host: ShmHost, board: Board, seed: int) -> None:
        self.slot = host.node.register(0, 2, POOL)
        to_read, self.to_write = os.pipe()
        self.from_read, from_write = os.pipe()
        self.from_file = os.fdopen(self.from_read, "rb")

        def run() -> None:
            with os.fdopen(from_write, "wb") as out:
                try:
                    player = Player(host.fds, self.slot, 0, board, seed)
                    while command := os.read(to_read, 1):
                        actions = {b"p": player.play, b"d": player.drop_all}
                        answer: Any = actions.get(command, player.give_spans)()
                        pickle.dump((answer, player.steps), out)
                        out.flush()
                    os._exit(0)
                except BaseException:
                    pickle.dump((traceback.format_exc(), -1), out)

        self.pid = fork(run)
        os.close(to_read)
        os.close(from_write)

    def tell(self, command: bytes) -> None:
        os.write(self.to_write, command)

    def answer(self) -> tuple[Any, int]:
        answer, steps = pickle.load(self.from_file)
        assert steps >= 0, f"the living player: {answer}"
        return answer, steps

    def ask(self, command: bytes) -> Any:
        self.tell(command)
        return self.answer()[0]

    def end(self) -> None:
        os.close(self.to_write)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.from_file.close()


class Arena:
    """One host, one living player, and one after another that is killed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.board = Board()
        self.host = ShmHost()
        self.living = Living(self.host, self.board, seed + 1)
        self.slot = self.host.node.register(0, 2, POOL)
        self.steps = 0

    def supply(self, player: int, slot: int) -> None:
        """Leases in advance what a player would ask the node for."""
        leases = self.board.leases(player)
        words, store = self.board.words, self.host.store
        for at in leases[1 : 1 + self.random.randrange(BLOCKS)]:
            if not words[at]:
                words[at] = store.lease(BIG_BYTES + 100, slot) or 0
        if not words[leases[0]]:
            words[leases[0]] = store.lease_span(slot) or 0

    def round(self) -> None:
        node, slot = self.host.node, self.slot
        self.supply(0, self.living.slot)
        self.supply(1, slot)
        self.board.words[0] = 0
        self.living.tell(b"p")
        host, board, seed = self.host, self.board, self.random.getrandbits(32)
        pid = fork(lambda: Player(host.fds, slot, 1, board, seed).play())
        delay = 50e-6 * 400 ** self.random.random()  # 50 us to 20 ms, each magnitude as often
        started = time.perf_counter()
        while (left := started + delay + 0.001 - time.perf_counter()) > 0:
            time.sleep(left)
        if self.random.random() < 0.2:
            self.spill()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the player that was to be killed has ended by an error"
        self.host.sweep(slot)
        for at in self.board.leases(1):
            self.board.words[at] = 0
        self.board.words[0] = 1
        self.steps += self.living.answer()[1]
        self.tend()
        self.check()
        node.unregister(slot)
        assert node.register(slot, 2, POOL) == slot

    def spill(self) -> None:
        """Bytes move out below the players, and back: not under SPILLED would they be readable."""
        store = self.host.store
        for _, oid, at, size in self.host.node.spill_candidates()[:3]:
            if store.spill_one(oid, at, size):
                store.restore(oid)

    def tend(self) -> None:
        """What the node does between two messages."""
        self.host.sweeper.completed(self.host.node_tasks.drain())
        self.host.results.poll()
        self.host.sweeper.collect()
        while self.host.node.news():  # what went held the last ref of something else
            self.host.sweeper.collect()
        self.host.store.take_returns()
        self.host.store.sweep_spans()

    # -- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        node, dead, live = self.host.node, self.slot, self.living.slot
        may_hold = {NODE, live}
        places: dict[int, int] = {}
        assert not self.host.masks_with(dead)
        for header in node.scan(free_too=True):
            holders = {*header["refs"], *header["pins"]}
            assert dead not in holders, f"a bit of the dead is left: {header}"
            state = header["state"]
            if state == "FREE":
                assert not holders, f"a free header is held: {header}"
                continue
            assert holders <= may_hold, f"held by nobody that is: {header}"
            if state in ("CLAIMED", "ABORTED"):
                assert header["claimant"] in may_hold, f"a claim of the dead is left: {header}"
            elif not holders:
                assert state == "FREED", f"nobody holds it, and it stays: {header}"
            if state == "FREED":
                assert header["owner"] == live, f"the node has not collected: {header}"
                assert self.freed_bit(header["id"]), f"its owner is not told: {header}"
            self.check_bytes(header, places)
        self.check_leases(places)

    def freed_bit(self, oid: int) -> int:
        table, index = oid >> 48, oid >> 32 & 0xFFFF
        at = self.host.table(table) + 192 + 512 + index // 64 * 8
        return self.host.word(at) >> index % 64 & 1

    def check_bytes(self, header: dict[str, Any], places: dict[int, int]) -> None:
        node, oid, at = self.host.node, header["id"], header["block"]
        if header["state"] not in SETTLED or header["flags"] & 8 or header["state"] == "CANCELLED":
            return
        if header["flags"] & 1:
            at = 0
        if at and header["state"] != "DELETED":
            assert at not in places, f"{oid:#x} and {places[at]:#x} lie in one block"
            places[at] = oid
            assert node.block_owner(at) == oid, f"the block is another's: {header}"
        if header["state"] == "SEALED":
            view = node.view(oid)
            assert not isinstance(view, int)
            seed, inside = check_payload(memoryview(view))
            if header["kind"] == 2 and seed:
                assert seed == oid, f"the result of {seed:#x}: {header}"
            for inner in inside:
                assert node.state(inner) != STATE["FREE"], f"{inner:#x} inside has gone: {header}"
            assert bool(inside) == bool(header["flags"] & 2)

    def check_leases(self, places: dict[int, int]) -> None:
        for payload, lessee in self.host.store.leases.items():
            owner = self.host.node.block_owner(payload)
            if owner == LEASED:
                assert lessee == self.living.slot, f"block {payload} of the dead is still leased"
            elif owner and payload not in places:
                header = self.host.node.inspect(owner)
                assert header["id"] == owner, f"block {payload} is leaked: its object is gone"
                assert header["block"] == payload, f"block {payload} is leaked: {header}"

    def finish(self) -> None:
        """Nothing is left when the living one drops everything."""
        node, store = self.host.node, self.host.store
        for _ in range(2):
            self.living.ask(b"d")
            self.tend()
        before, left = -1, node.scan()
        while len(left) != before:  # what goes held the last ref of something else
            for offset in self.living.ask(b"g"):
                store.give_span(offset, self.living.slot)
            self.tend()
            before, left = len(left), node.scan()
        assert not left, f"{len(left)} objects are leaked:\n{describe(left)}"
        unused = {self.board.words[at] for at in self.board.leases(0)}
        for payload in set(store.leases) - unused:
            owner = node.block_owner(payload)
            # taken over by the living one, which has not used it yet
            assert owner == LEASED, f"block {payload} is leaked, its owner is {owner:#x}"
            assert store.leases[payload] == self.living.slot
        assert set(store.spans) <= unused, "spans are leaked"
        assert node.client_info(self.slot)["puts"], "the killed ones never came to anything"
        assert not self.host.results.untaken
        assert not self.host.sweeper.inner

    def close(self) -> None:
        self.board.words[0] = 1
        self.living.end()
        self.host.close()


def kill(rounds: int, seed: int) -> None:
    print()
    steps = 0
    while rounds > 0:
        arena = Arena(seed)
        try:
            for at in range(min(rounds, ROUNDS_OF_A_HOST)):
                try:
                    arena.round()
                    if at % 10 == 9:
                        arena.living.ask(b"d")  # else objects inside objects pile up
                except BaseException:
                    print(f"host of seed {seed}, round {at}")
                    raise
            arena.finish()
            steps += arena.steps
        finally:
            arena.close()
        rounds -= ROUNDS_OF_A_HOST
        seed += 1000
    assert steps, "the living player never came to anything"


def test_nothing_of_a_killed_client_is_left() -> None:
    kill(ROUNDS_OF_A_HOST // 2, 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_nothing_of_ten_thousand_killed_clients_is_left(seed: int) -> None:
    kill(100, seed)
