"""Random programs in real engines and in their twin, hoplite_mp/_common/transfer_model.py.

A program is cells on some hosts: sources (whole, or only a part of them there; some are placed when
all else is made, and some of these are closed before and made again), pulls of cells at
other hosts, folds of cells at the same host, made in an order where requests often come before what
they ask for; pulls move to other links on the way, and one link is cut. The twin runs it without
bytes. Both must agree on how far each cell comes, on the watermarks that it may show on the way,
and on who is in it in which order: float32 sums of these values differ with the order.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoplite_mp import _engine
from hoplite_mp._common import transfer_model
from tests.support.engine_hosts import EngineHost, join

Array = np.ndarray[Any, Any]
OP, DTYPE = "sum", "float16"
RAW, PARTIAL = np.dtype(np.float16), np.dtype(np.float32)


@dataclasses.dataclass
class Cell:
    """Of a program; its number is also its name in the twin and its key in the engines."""

    number: int
    host: int
    dtype: np.dtype[Any]
    array: Array
    filled: int = 0
    pulled: int | None = None
    sources: tuple[int, ...] = ()


class Program:
    """Drawn by chance from a seed: chains, stars, trees and folds of folds all come up."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = self.chance = random.Random(seed)
        self.hosts = chance.randint(2, 4)
        self.count = chance.choice([0, 1, 100, 20_000, 99_999])
        self.block_bytes_max = chance.choice([16384, 32768, 262144])
        self.cells: list[Cell] = []
        rng = np.random.default_rng(seed)
        for _ in range(chance.randint(1, 4)):
            array = (rng.normal(size=self.count) * 10.0 ** rng.integers(-3, 4)).astype(RAW)
            cell = self._add(chance.randrange(self.hosts), RAW, array)
            whole = chance.random() < 0.8
            cell.filled = array.nbytes if whole else chance.randint(0, self.count) * 2
        for _ in range(chance.randint(1, 12)):
            if chance.random() < 0.6:
                origin = chance.choice(self.cells)
                others = [host for host in range(self.hosts) if host != origin.host]
                self._add(chance.choice(others), origin.dtype).pulled = origin.number
            else:
                host = chance.choice(self.cells).host
                near = [cell.number for cell in self.cells if cell.host == host]
                sources = tuple(chance.choices(near, k=chance.randint(1, 3)))
                self._add(host, PARTIAL).sources = sources

    def _add(self, host: int, dtype: np.dtype[Any], array: Array | None = None) -> Cell:
        array = np.zeros(self.count, dtype) if array is None else array
        self.cells.append(Cell(len(self.cells), host, dtype, array))
        return self.cells[-1]

    def in_some_order(self) -> list[Cell]:
        """Only a fold must come after its sources."""
        left, order = list(self.cells), list[Cell]()
        while left:
            made = {cell.number for cell in order}
            cell = self.chance.choice([one for one in left if made.issuperset(one.sources)])
            left.remove(cell)
            order.append(cell)
        return order

    def twin(self) -> transfer_model.TransferModel:
        twin = transfer_model.TransferModel()
        for cell in self.in_some_order():
            size = cell.array.nbytes
            twin.cell(cell.number, size, cell.filled, self.block_bytes_max)
            if cell.pulled is not None:
                twin.pull(cell.number, cell.pulled)
            elif cell.sources:
                sources = [(one, self.cells[one].dtype.itemsize) for one in cell.sources]
                twin.fold(cell.number, sources, cell.dtype.itemsize)
        return twin

    def value(self, tree: Any) -> Array:
        """What stands in a cell with these contributors."""
        if isinstance(tree, int):
            return self.cells[tree].array
        total = self.value(tree[0]).astype(PARTIAL)
        for part in tree[1:]:
            total = total + self.value(part).astype(PARTIAL)
        return total


class Run:
    """A program in engines: two links between any two hosts, numbered as each side does."""

    def __init__(self, program: Program) -> None:
        self.program = program
        count = program.hosts
        self.hosts = [
            EngineHost(i + 1, block_bytes_max=program.block_bytes_max) for i in range(count)
        ]
        self.links: dict[tuple[int, int], list[int]] = {}
        pairs = [(one, other) for one in range(count) for other in range(one)] * 2
        program.chance.shuffle(pairs)
        for one, other in pairs:
            here, there = join(self.hosts[one], self.hosts[other])
            self.links.setdefault((one, other), []).append(here)
            self.links.setdefault((other, one), []).append(there)
        self.numbers: dict[int, int] = {}
        self.seen: dict[int, set[int]] = {cell.number: {cell.filled} for cell in program.cells}
        self.told = [0] * count

    def begin(self) -> None:
        for cell in self.program.in_some_order():
            engine = self.hosts[cell.host].engine
            buffer, key = cell.array.view(np.uint8), (cell.number, 0, 0, 0)
            number = self.numbers[cell.number] = engine.cell(key, buffer, filled=cell.filled)
            if cell.pulled is not None:
                self.pull(cell)
            elif cell.sources:
                partial = {
                    self.numbers[one]
                    for one in cell.sources
                    if self.program.cells[one].dtype == PARTIAL
                }
                sources = [self.numbers[one] for one in cell.sources]
                engine.fold(number, sources, OP, DTYPE, accumulated=partial, final=False)

    def pull(self, cell: Cell) -> None:
        """Over one of the links that are left; also if it is under way over another one."""
        assert cell.pulled is not None
        there = self.program.cells[cell.pulled].host
        link = self.program.chance.choice(self.links[cell.host, there])
        self.hosts[cell.host].engine.pull(self.numbers[cell.number], link, (cell.pulled, 0, 0, 0))

    def cut_one_link(self) -> None:
        ends = self.program.chance.choice(list(self.links))
        link = self.links[ends].pop()
        self.links[ends[::-1]].pop()
        self.hosts[ends[0]].engine.disconnect(link)

    def look(self) -> None:
        """Watermarks as they are; pulls that have failed begin again."""
        for cell in self.program.cells:
            self.seen[cell.number].add(self.watermark(cell))
        for host, told in enumerate(self.told):
            events = self.hosts[host].told
            self.told[host] = len(events)
            failed = {event[1] for event in events[told:] if event[0] == _engine.PULL_FAILED}
            for cell in self.program.cells:
                if cell.host == host and self.numbers[cell.number] in failed:
                    self.pull(cell)

    def watermark(self, cell: Cell) -> int:
        return self.hosts[cell.host].engine.watermark(self.numbers[cell.number])

    def stop(self) -> None:
        for host in self.hosts:
            host.engine.stop()


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_the_engine_does_what_the_rule_says(seed: int) -> None:
    program = Program(seed)
    twin = program.twin()
    promised = {cell.number: {0, cell.filled} for cell in program.cells}
    for number, watermark in twin.run():
        assert isinstance(number, int)
        promised[number].add(watermark)
    run = Run(program)
    try:
        run.begin()
        pulls = [cell for cell in program.cells if cell.pulled is not None]
        for _ in range(program.chance.randint(0, 5) if pulls else 0):
            run.pull(program.chance.choice(pulls))
        if program.chance.random() < 0.5:
            run.cut_one_link()

        def all_there() -> bool:
            for host in run.hosts:
                host.told += host.engine.events()
            run.look()
            cells = program.cells
            return all(run.watermark(cell) == twin.watermark(cell.number) for cell in cells)

        run.hosts[0].wait(all_there)
    finally:
        run.stop()
    for cell in program.cells:
        assert run.seen[cell.number] <= promised[cell.number]
        come = twin.watermark(cell.number) // cell.dtype.itemsize
        expected = program.value(twin.contributors(cell.number))
        assert cell.array[:come].tobytes() == expected[:come].tobytes()


# -- the twin itself -----------------------------------------------------------------


def test_blocks_follow_each_other_down_a_chain() -> None:
    """A row of hosts: the last has everything after as many steps as blocks and hosts."""
    twin = transfer_model.TransferModel()
    nbytes = 8 * 65536
    twin.cell(0, nbytes, filled=nbytes)
    for host in range(1, 4):
        twin.cell(host, nbytes)
        twin.pull(host, host - 1)
    assert twin.advance() == [(1, 65536)]
    assert twin.advance() == [(1, 2 * 65536), (2, 65536)]
    steps = 2
    while twin.advance():
        steps += 1
    assert steps == 8 + 2
    assert twin.contributors(3) == 0


def test_a_fold_waits_for_all_of_its_sources() -> None:
    twin = transfer_model.TransferModel()
    twin.cell("a", 40_000, filled=40_000)
    twin.cell("b", 20_000, filled=16_000)
    twin.cell("total", 40_000)
    twin.fold("total", [("a", 4), ("b", 2)], 4)
    assert twin.run() == [("total", 16384)]
    assert twin.contributors("total") == ("a", "b")


@pytest.mark.parametrize("nbytes", [0, 1, 16384, 131072, 131073, 200_000, 10**7])
def test_blocks_are_cut_as_the_engine_cuts_them(nbytes: int) -> None:
    block = transfer_model.block_bytes_for(nbytes, 262144)
    assert 16384 <= block <= 262144
    assert block % 64 == 0
    assert nbytes <= 9 * block or block == 262144
    assert transfer_model.goal(nbytes, 0, block) == min(nbytes, block)


def test_mistakes() -> None:
    twin = transfer_model.TransferModel()
    twin.cell("a", 10)
    with pytest.raises(ValueError, match="exists"):
        twin.cell("a", 10)
    with pytest.raises(ValueError, match="filled"):
        twin.cell("b", 10, filled=11)
    twin.cell("b", 12)
    with pytest.raises(ValueError, match="items"):
        twin.fold("b", [("a", 2)], 2)
    twin.pull("a", "b")
    with pytest.raises(ValueError, match="already filled"):
        twin.fold("a", [("b", 2)], 2)
