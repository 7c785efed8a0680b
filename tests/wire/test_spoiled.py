"""Two hosts and a wire that cuts, holds, shortens and changes what it carries, at random bytes.

Whatever strikes: what a program gets is exact or a clear error, within the time that a loss takes;
its process lives, and the two hosts find each other again.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster
from tests.wire.proxy import KINDS, Fault, Wires

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS = range(7000, 7006)  # the manager's, then those of nodes
BULK_BYTES = 4_000_000  # of what one round moves in each direction
MESSAGE_BYTES = 4_000
ROUND_S_MAX = 25.0

PROGRAM = """
import threading
def other():
    deadline = time.monotonic() + 40
    while True:
        found = [n for n in c.nodes if n.host == "h2" and n.workers]
        if found:
            return found[0]
        assert time.monotonic() < deadline, "the other host does not come back"
        time.sleep(0.02)
def double(x, i):
    return x * 2 + i
def attempt(get, want):
    try:
        got = get()
    except TimeoutError as error:
        # A member that dies before all have come leaves a group that cannot fill.
        return "unfilled" if "members joined" in str(error) else "HANGS"
    except hoplite_mp.HopliteError as error:
        return type(error).__name__
    return "exact" if np.array_equal(got, want) else "WRONG"
def peer(rank, i):
    with hoplite_mp.current().group(f"g{i}", 2, rank, timeout=6) as g:
        found = []
        for size in (10, 200_000):
            total = g.allreduce(np.full(size, rank + 1.0 + i))
            want = sum(rank + 1.0 + i for rank in g.contributors)
            found.append(bool(np.all(total == want)))
    return found
number = 0
while line := input():
    i, begun = int(line), time.monotonic()
    while True:
        try:
            there = c.options(node=other(), retries=1)
            break
        except hoplite_mp.NodeLostError:  # it has just gone
            pass
    x = np.random.default_rng(i).standard_normal(250_000)
    ref = c.put(x)
    small = [there.submit(double, np.full(20, k), i) for k in range(20)]
    large = [there.submit(double, ref, k) for k in range(2)]
    total = c.allreduce([ref, large[0].ref])
    try:  # tried again, a peer could find that the other one has finished, and wait for it
        members = c.options(retries=0).spmd(peer, 2, i) if i % 3 == 0 else []
    except hoplite_mp.NodeLostError:
        members = []
    said = [attempt(lambda: f.result(20), np.full(20, 2 * k + i)) for k, f in enumerate(small)]
    said += [attempt(lambda: f.result(20), 2 * x + k) for k, f in enumerate(large)]
    said.append(attempt(lambda: c.get(total, timeout=20), x + 2 * x))
    said += [attempt(lambda: f.result(25), [True, True]) for f in members]
    del ref, small, large, total, members
    print(f"{time.monotonic() - begun:.2f}", *sorted(set(said)), flush=True)
while True:  # a host that is not in the cluster when that ends has joined nothing, and says so
    try:
        print(c.options(node=other(), retries=0).submit(lambda: "whole").result(20), flush=True)
        break
    except hoplite_mp.NodeLostError:
        pass
"""


class Spoiled:
    """The cluster, its wires, and a program on the first host."""

    def __init__(self, lan: Lan, tls: bool) -> None:
        self.wires = Wires(lan[0], lan[1], (lan[2], lan[3]), PORTS)
        options = ("--ports", f"{PORTS[1]}-{PORTS[-1]}")
        self.cluster = UpCluster(lan, tls=tls, workers=2, options=options, joins=1)
        self.said: list[tuple[Fault, str]] = []
        self.codes: list[int] = []  # of lives that ended before the cluster
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _keep(self) -> None:
        """As a supervisor of services would: `join` ends when it is given up again and again."""
        while not self._over.wait(0.1):
            code = self.cluster.joined[0].poll()
            if code is not None:
                self.codes.append(code)
                self.cluster.joined = [self.cluster.join(self.cluster.lan[1], 2)]

    def end(self) -> None:
        """Everything ends orderly when nothing strikes any more."""
        self._over.set()
        self._keeper.join()
        self.wires.to_one.arm(None)
        self.wires.to_other.arm(None)
        codes = self.cluster.end()
        assert codes == [0, 0], codes
        assert set(self.codes) <= {1}, self.codes

    def stop(self) -> None:
        self._over.set()
        self._keeper.join()
        self.wires.close()

    def round(self, driver: Driver, number: int, fault: Fault, to_other: bool) -> None:
        """One fault while that work runs."""
        proxy = self.wires.to_other if to_other else self.wires.to_one
        before = len(proxy.struck)
        proxy.arm(fault)
        driver.say(str(number))
        heard = driver.hear()
        proxy.arm(None)
        if len(proxy.struck) > before:
            self.said.append((fault, heard))
        assert heard, f"the program has died of {fault}"
        seconds, *words = heard.split()
        assert "WRONG" not in words, (fault, heard)
        assert "HANGS" not in words, (fault, heard)
        assert float(seconds) < ROUND_S_MAX, (fault, heard)


@pytest.fixture
def spoiled(lan_permitted: None, request: pytest.FixtureRequest) -> Iterator[Spoiled]:
    with Lan(4) as lan:
        made = Spoiled(lan, request.param)
        try:
            yield made
            made.end()
        finally:
            made.stop()


def play(spoiled: Spoiled, seed: int, kinds: tuple[str, ...], rounds: int) -> None:
    chance = random.Random(seed)
    with Driver(spoiled.cluster, spoiled.cluster.lan[0], PROGRAM) as driver:
        for number in range(rounds):
            kind = kinds[number % len(kinds)]
            at = chance.randrange(BULK_BYTES if chance.random() < 0.5 else MESSAGE_BYTES)
            fault = Fault(kind, chance.random() < 0.5, at, chance.randrange(8))
            print(fault, flush=True)
            spoiled.round(driver, number, fault, chance.random() < 0.5)
        driver.say()
        assert driver.hear() == "whole"
    for fault, heard in spoiled.said:
        print(fault, heard)
    assert len(spoiled.said) * 3 >= rounds, "hardly any fault has struck"


@pytest.mark.parametrize("spoiled", [pytest.param(False, id="plain")], indirect=True)
def test_some_faults(spoiled: Spoiled) -> None:
    play(spoiled, 1, ("flip", "reset"), 4)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "spoiled", [pytest.param(True, id="tls"), pytest.param(False, id="plain")], indirect=True
)
def test_every_kind_of_fault(spoiled: Spoiled, seed: int) -> None:
    play(spoiled, seed, KINDS, 4 * len(KINDS))
