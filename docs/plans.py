"""Draws plans of the real planner in time: `python docs/plans.py`.

docs/how_it_works.md shows a broadcast and a reduction as they go on. The planner and the programs
that nodes derive from its plans are the real ones, on the network of `hoplite-mp simulate`; every
block that arrives is written down, and drawn by who has sent it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import COLOURS, EDGE, GREY, INK, Drawing

from hoplite_mp._simulation.scale.node import CollectiveRequest
from hoplite_mp._simulation.scale.scale import ScaleWorld
from hoplite_mp._simulation.scale.streams import ScaleStream

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
NBYTES = 64 << 20
RATE = 125e6  # bytes per second: 1 Gbit/s, each way
ASKER = 1
WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 720, 74, 46, 74, 52, 14
STEPS = 90  # of an area, from left to right


class Block(NamedTuple):
    """What has arrived: when, from which host, at which host, how many bytes."""

    seconds: float
    sender: int
    receiver: int
    nbytes: int


class Played(NamedTuple):
    """One collective in virtual time."""

    nodes: int
    ready: Sequence[float]  # when each host's part was ready, in seconds; none for a broadcast
    ended: float
    blocks: list[Block]


def play(nodes: int, ready: Sequence[float] = (), num: int = 1) -> Played:
    """A broadcast from the asking host; with `ready`, a reduction of the first `num` parts."""
    blocks: list[Block] = []
    arrive = ScaleStream.arrive

    def arrived(stream: ScaleStream, begin: int, end: int) -> None:
        server = stream.server
        blocks.append(Block(server.network.timeline.now, server.host, stream.to, end - begin))
        arrive(stream, begin, end)

    world = ScaleWorld(nodes, RATE)
    asker = world.nodes[ASKER]
    wanted = CollectiveRequest("broadcast", (world.put(asker, NBYTES),), 1)
    if ready:
        parts = zip(world.nodes, ready, strict=True)
        sources = tuple(world.put(node, NBYTES, late) for node, late in parts)
        wanted = CollectiveRequest("reduce", sources, num, (world.result(asker, NBYTES),))
    with mock.patch.object(ScaleStream, "arrive", arrived):
        ended = world.run([asker.begin(wanted)])
    return Played(nodes, ready, ended, blocks)


def drawing(played: Played, title: str, words: str, bound: float) -> str:
    """A lane for each host: how much it has received by then, in the colours of the senders."""
    height = TOP + (LANE + GAP) * played.nodes + 34
    d = Drawing(WIDTH, height, title)
    d.text(LEFT, 24, title, bold=True)
    d.text(LEFT, 42, words, colour=GREY, size=11)
    until = max(played.ended, bound, *played.ready) * 1.04
    scale = (WIDTH - LEFT - RIGHT) / until
    bottom = height - 30
    for tick in range(int(until * 10) + 1):
        x = LEFT + tick / 10 * scale
        d.line(x, TOP - 6, x, bottom, EDGE)
        d.text(x, bottom + 16, f"{tick / 10:.1f} s", anchor="middle", colour=GREY, size=11)
    for host in range(played.nodes):
        low = TOP + (LANE + GAP) * host + LANE
        d.text(12, low - LANE / 2 + 5, f"host {host}", bold=True, colour=COLOURS[host])
        d.line(LEFT, low, WIDTH - RIGHT, low, EDGE)
        _received(d, played, host, low, scale)
        if played.ready:
            x = LEFT + played.ready[host] * scale
            d.area([(x, low - LANE), (x - 5, low - LANE - 9), (x + 5, low - LANE - 9)], INK)
        elif host == ASKER:
            d.area([(LEFT, low), (LEFT, low - LANE), (LEFT + 7, low - LANE), (LEFT + 7, low)], INK)
            d.text(LEFT + 14, low - LANE / 2 + 5, "has the object", colour=GREY, size=11)
    for x, name, dash in (
        (LEFT + bound * scale, f"no plan can beat {bound:.3f} s", "4 3"),
        (LEFT + played.ended * scale, f"{played.ended:.3f} s", ""),
    ):
        d.line(x, TOP - 10, x, bottom, INK, dash=dash)
        side = "end" if dash else "start"
        d.text(x + (-4 if dash else 4), TOP - 16, name, anchor=side, colour=INK, size=11)
    return d.whole()


def _received(d: Drawing, played: Played, host: int, low: float, scale: float) -> None:
    mine = [block for block in played.blocks if block.receiver == host]
    if not mine:
        return
    begin = min(block.seconds for block in mine) - 1e-9
    step = (played.ended - begin) / STEPS
    times = [begin + step * number for number in range(STEPS + 1)]
    below = [0.0] * len(times)
    for sender in sorted({block.sender for block in mine}):
        theirs = [block for block in mine if block.sender == sender]
        above = [
            under + sum(block.nbytes for block in theirs if block.seconds <= time) / NBYTES * LANE
            for time, under in zip(times, below, strict=True)
        ]
        xs = [LEFT + time * scale for time in times]
        edge = [(x, low - y) for x, y in zip(xs, above, strict=True)]
        back = [(x, low - y) for x, y in zip(xs, below, strict=True)]
        d.area(edge + back[::-1], COLOURS[sender])
        below = above


def broadcast() -> str:
    """One object from one host to three others."""
    words = "what each host has received, in the colours of the hosts that sent it"
    title = "Broadcast of 64 MiB from host 1 to three others, 1 Gbit/s"
    return drawing(play(4), title, words, NBYTES / RATE)


def reduction() -> str:
    """The first three of four parts to be ready, added up at one host."""
    ready, num = (0.0, 0.1, 0.8, 0.2), 3
    words = "▼ the part of this host is ready; below, what it has received of others and of sums"
    title = "Reduction of the first 3 of 4 parts of 64 MiB, to host 1, 1 Gbit/s"
    return drawing(play(4, ready, num), title, words, sorted(ready)[num - 1] + NBYTES / RATE)


PICTURES = {"broadcast.svg": broadcast, "reduction.svg": reduction}


def main() -> None:
    """Write all."""
    for name, draw in PICTURES.items():
        (HERE / "pictures" / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
