"""Simulated streams against the rule that is compared with the compiled engine.

`tests/cext/test_engine_rule.py` lets random programs run in engines and in `rule.Rule`; here others
run in `rule.Rule` and in simulated engines, on links that are slow, fast, and end on the way. Both
must agree on how far each cell comes, which watermarks it may show, and who is in it, in order.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from hoplite_mp import rule
from hoplite_mp.simulation.contents import Content, Contents
from hoplite_mp.simulation.memory import Memory
from hoplite_mp.simulation.network import Network
from hoplite_mp.simulation.streams import Cell, Engine, WrongBytes
from hoplite_mp.simulation.timeline import Timeline

EVENTS_MAX = 100_000
SEEDS = range(120)


def leaves(tree: Any) -> list[Any]:
    """A tree of `Rule.contributors`, from left to right."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


class Play:
    """A random program, in a twin and on simulated hosts."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.timeline = Timeline(seed)
        network = Network(self.timeline, chance.choice([1e-5, 1e-2]), chance.choice([0.0, 1e-3]))
        self.contents = Contents()
        block = chance.choice([16384, 65536, 262144])
        self.engines = []
        for _ in range(chance.randint(2, 4)):
            host = network.add(chance.choice([1e6, 1e8]), chance.choice([1e6, 1e8]))
            self.engines.append(Engine(network, host, self.contents, block))
        self.twin = rule.Rule()
        self.nbytes = chance.choice([64, 400, 80_000, 399_996])
        self.cells: list[tuple[int, Cell]] = []
        self.pulled: dict[Cell, tuple[int, int]] = {}
        self.shown: dict[int, set[int]] = {}
        for _ in range(chance.randint(1, 4)):
            filled = self.nbytes if chance.random() < 0.8 else chance.randint(0, self.nbytes)
            self._add(chance.randrange(len(self.engines)), block, filled)
        for _ in range(chance.randint(1, 14)):
            if chance.random() < 0.6:
                number = chance.randrange(len(self.cells))
                host = chance.choice(
                    [one for one in range(len(self.engines)) if one != self.cells[number][0]]
                )
                cell = self._add(host, block)
                self.twin.pull(len(self.cells) - 1, number)
                self.pulled[cell] = host, number
                cell.filled_by = self
            else:
                host = chance.choice(self.cells)[0]
                near = [k for k, (at, _) in enumerate(self.cells) if at == host]
                sources = chance.choices(near, k=chance.randint(1, 3))
                cell = self._add(host, block)
                self.twin.fold(len(self.cells) - 1, [(k, 4) for k in sources], 4)
                self.engines[host].fold(cell, [self.cells[k][1] for k in sources])
        for cell in self.pulled:
            self.timeline.after(chance.random() * 0.01, self.pull, cell)
        for _ in range(chance.randint(0, 3)):
            one, other = chance.sample(self.engines, 2)
            self.timeline.after(chance.random() * 0.02, one.lose, other, "it was cut")

    def _add(self, host: int, block: int, filled: int = 0) -> Cell:
        number = len(self.cells)
        self.twin.cell(number, self.nbytes, filled, block)
        memory = Memory(self.nbytes)
        memory.write(0, filled, self.contents.leaf(number), 0)
        cell = self.engines[host].cell((number, 0, 0, 0), memory, 0, self.nbytes, filled)
        self.cells.append((host, cell))
        self.shown[number] = {filled}
        return cell

    def pull(self, cell: Cell) -> None:
        host, number = self.pulled[cell]
        if not cell.closed:
            self.engines[host].pull(cell, self.engines[self.cells[number][0]], (number, 0, 0, 0))

    def filled(self, cell: Cell) -> None:
        """Of no interest here."""

    def failed(self, cell: Cell, reason: str) -> None:
        self.timeline.after(0.001, self.pull, cell)

    def look(self) -> None:
        for number, (_, cell) in enumerate(self.cells):
            self.shown[number].add(cell.watermark)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 40))
def test_simulated_streams_do_what_the_rule_says(first: int) -> None:
    for seed in SEEDS[first : first + 40]:
        play = Play(seed)
        promised = {number: set(shown) for number, shown in play.shown.items()}
        for number, watermark in play.twin.run():
            assert isinstance(number, int)
            promised[number].add(watermark)
        events = 0
        while not play.timeline.run(events, 1e6):
            play.look()
            events += 1
            assert events < EVENTS_MAX, f"seed {seed} does not end"
        play.look()
        for number, (_, cell) in enumerate(play.cells):
            assert cell.watermark == play.twin.watermark(number), f"seed {seed}, cell {number}"
            assert play.shown[number] <= promised[number], f"seed {seed}, cell {number}"
            expected = leaves(play.twin.contributors(number))
            assert cell.memory is not None
            for row in cell.memory.rows:
                assert row.content.leaves() == expected, f"seed {seed}, cell {number}"
                assert row.shift == 0
            assert sum(row.end - row.begin for row in cell.memory.rows) == cell.watermark


def test_a_part_of_a_cell_in_both() -> None:
    twin = rule.Rule()
    twin.cell("whole", 100_000, filled=100_000)
    twin.cell("part", 70_000)
    twin.pull("part", "whole")
    assert twin.run()[-1] == ("part", 70_000)


def test_memory_is_as_if_it_were_written_byte_by_byte() -> None:
    chance = random.Random(0)
    contents = Contents()
    names = [contents.leaf(name) for name in "abc"]
    for _ in range(200):
        memory = Memory(40)
        plain: list[tuple[Content, int] | None] = [None] * 40
        for _ in range(chance.randint(1, 12)):
            begin, end = sorted((chance.randint(0, 40), chance.randint(0, 40)))
            content, shift = chance.choice(names), chance.choice([0, 0, 7])
            memory.write(begin, end, content, shift)
            plain[begin:end] = [(content, shift)] * (end - begin)
        begin, end = sorted((chance.randint(0, 40), chance.randint(0, 40)))
        found: list[tuple[Content, int] | None] = [None] * 40
        for row in memory.read(begin, end):
            assert begin <= row.begin < row.end <= end
            found[row.begin : row.end] = [(row.content, row.shift)] * (row.end - row.begin)
        assert found[begin:end] == plain[begin:end]


def test_a_fold_of_bytes_that_nobody_wrote_is_seen() -> None:
    timeline = Timeline(0)
    network = Network(timeline, 0.0, 0.0)
    engine = Engine(network, network.add(1.0, 1.0), Contents(), 65536)
    source = engine.cell(None, Memory(64), 0, 64, 64)
    engine.fold(engine.cell(None, Memory(64), 0, 64, 0), [source])
    with pytest.raises(WrongBytes, match="nobody has written"):
        timeline.run(100, 1.0)
