"""A driver of a campaign: `python -m tests.campaign.driver '{...}'`, in a process of its own.

It makes a cluster, or attaches to one, and lets several hands work on it. It speaks with the
program that runs the campaign in lines of JSON: words on its stdin ("warm", "go", "drop", "count",
"end"), answers on its stdout, and twice a second what each hand is doing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import hoplite_mp
from tests.campaign import operations
from tests.campaign.hand import CALLS, Board, Hand
from tests.campaign.model import MANY, World
from tests.campaign.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STACKS", "Orders"]

assert operations
STACKS = signal.SIGUSR2  # where every thread stands, on stderr
BEAT_S = 0.5
WORK_S = 0.03
DROP_S = 100.0


@dataclasses.dataclass
class Orders:
    """What one driver is to be."""

    seed: int
    number: int  # of this driver in its program, from 1
    threads: int
    tally: str
    scratch: str
    cluster: dict[str, Any]  # arguments of Cluster
    small: bool = False
    lossy: bool = False
    exposed: bool = False
    interrupted: bool = False  # Ctrl-C, again and again


class Driver:
    """The hands, and what is said about them."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.world = World(
            Tally(orders.tally), orders.small, orders.lossy, orders.exposed, orders.interrupted
        )
        self.saying = threading.Lock()
        self.hands: list[Hand] = []
        self.board = Board()
        self.c: Any = hoplite_mp.Cluster(**orders.cluster)
        self.done: Counter[str] = Counter()
        self.main: queue.SimpleQueue[Hand | None] = queue.SimpleQueue()  # for the main thread

    def say(self, what: str, **more: Any) -> None:
        with self.saying:
            print(json.dumps({"say": what, **more}), flush=True)

    def hand(self, at: int) -> Hand:
        number = self.orders.number * 10 + at
        seed = self.orders.seed * 1000 + number
        return Hand(self.c, self.world, self.board, number, seed, self.orders.scratch)

    def warm(self) -> None:
        """Every call once: what is made at first use is there from then on."""
        hand = self.hand(9)
        if self.world.small:  # the spill file
            with contextlib.suppress(hoplite_mp.StoreFullError):
                refs = [self.c.put(hand.array(1_000_000, "f8")) for _ in range(10)]
                del refs
        try:
            for name in CALLS:
                hand.make(name)
        except BaseException as error:
            hand.failure = error
        self.hands = [hand]
        self.drop()

    def go(self) -> None:
        self.hands = [self.hand(at) for at in range(self.orders.threads)]
        first, *others = self.hands
        self.main.put(first)
        for hand in others:
            hand.start()

    def beat(self) -> None:
        """Says what the hands are doing, for as long as this process lives."""
        while True:
            time.sleep(BEAT_S)
            now = time.monotonic()
            doing = [[hand.now, round(now - hand.since, 1)] for hand in self.hands if hand.now]
            self.say("beat", doing=doing, turns=sum(sum(h.done.values()) for h in self.hands))
            for hand in self.hands:
                if hand.failure is not None:
                    self.tell(hand)
                del hand  # it has the Cluster, which shall be dropped

    def tell(self, hand: Hand) -> None:
        """What has failed, and before that."""
        error, hand.failure = hand.failure, None
        if error is not None:
            text = "".join(traceback.format_exception(error))
            history = list(hand.history)
            self.say("failure", hand=hand.name, history=history, error=text)

    def drop(self) -> None:
        """The hands stop, and nothing of theirs is left."""
        for hand in self.hands:
            hand.over.set()
        for hand in self.hands:
            if hand.begun:
                hand.ended.wait(DROP_S)
            self.done.update(hand.done)
            self.tell(hand)
        self.hands = []
        self.board.drop()
        gc.collect()
        self.say("dropped", calls=dict(self.done))

    def lose(self) -> None:
        """The Cluster goes with what held it, and nobody has called shutdown."""
        self.drop()
        cluster = weakref.ref(self.c)
        self.c = None
        deadline = time.monotonic() + DROP_S
        while cluster() is not None:
            gc.collect()
            if time.monotonic() > deadline:
                raise AssertionError(f"it is held by {gc.get_referrers(cluster())}")
            time.sleep(0.05)

    def work(self) -> None:
        """Every worker has run a task: it is not one that dies as it starts."""
        workers = sum(node.workers for node in self.c.nodes)
        view = self.c.options(retries=MANY)
        self.c.wait([view.submit(time.sleep, WORK_S) for _ in range(4 * workers)])
        self.say("worked")

    def count(self) -> None:
        gc.collect()
        stats = self.c.stats()
        found = {name: stats[name] for name in ("objects", "bytes_used", "bytes_spilled")}
        headers = [
            f"{one['kind']} {one['state']} of {one['owner']}, {one['size']} bytes, held by "
            f"{one['refs']}, pinned by {one['pins']}"
            for one in self.c._runtime.client.scan()
        ]
        found["objects"] -= len(self.c._runtime.submitter._functions)  # sent, and kept for later
        self.say(
            "counted", **found, headers=headers, workers=[node.workers for node in self.c.nodes]
        )

    def nodes(self) -> None:
        self.say("named", nodes={n.host: n.id for n in self.c.nodes if n.workers})

    def grow(self) -> None:
        self.c.add_workers(1)
        self.say("grown")

    def remove(self, host: str) -> None:
        """That host leaves in order."""
        for node in self.c.nodes:
            if node.host == host:
                with contextlib.suppress(ValueError, hoplite_mp.NodeLostError):  # it has died
                    self.c.remove_node(node)
        self.say("removed")

    def play(self) -> None:
        """Hands that work in the main thread, which Ctrl-C reaches, until it is over."""
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                hand = self.main.get()
                if hand is None:
                    return
                hand.run()
                del hand  # it has the Cluster

    def obey(self) -> None:
        """Until there are no more words."""
        words: dict[str, Callable[..., None]] = {
            "warm": self.warm,
            "go": self.go,
            "drop": self.drop,
            "lose": self.lose,
            "work": self.work,
            "count": self.count,
            "nodes": self.nodes,
            "grow": self.grow,
            "remove": self.remove,
        }
        self.say("ready", pid=os.getpid(), address=self.c.address)
        threading.Thread(target=self.beat, daemon=True, name="beat").start()
        for line in sys.stdin:
            word, *more = line.split()
            if word == "end":
                break
            try:
                words[word](*more)
            except Exception:
                self.say("failure", hand="main", history=[word], error=traceback.format_exc())
        self.main.put(None)


def main() -> None:
    faulthandler.register(STACKS, all_threads=True)
    driver = Driver(Orders(**json.loads(sys.argv[1])))
    threading.Thread(target=driver.obey, daemon=True, name="words").start()
    driver.play()
    if driver.c is not None:
        driver.c.shutdown()
    driver.say("ended")


if __name__ == "__main__":
    main()
