"""Simulated streams against the rule that is compared with the compiled engine.

`tests/cext/test_engine_rule.py` lets random programs run in engines and in `TransferModel`; here
others run in `TransferModel` and in simulated engines, on links that are slow or fast. Both must
agree on how far each cell comes, which watermarks it may show, and who is in it, in
order.
"""

from __future__ import annotations

import random

import pytest

from hoplite_mp._common import transfer_model
from hoplite_mp._simulation.network import VirtualNetwork
from hoplite_mp._simulation.scale.streams import ScaleCell, ScaleEngine, WrongPlace
from hoplite_mp._simulation.timeline import Timeline

EVENTS_MAX = 100_000
SEEDS = range(120)
KEY = (1, 1, 0, 0)


class Play:
    """A random program, in a twin and on simulated hosts."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.timeline = Timeline(seed)
        network = VirtualNetwork(self.timeline, rng.choice([1e-5, 1e-2]), rng.choice([0.0, 1e-3]))
        block = rng.choice([16384, 65536, 262144])
        self.engines = []
        for _ in range(rng.randint(2, 4)):
            host = network.add(rng.choice([1e6, 1e8]), rng.choice([1e6, 1e8]))
            self.engines.append(ScaleEngine(network, host, block))
        self.twin = transfer_model.TransferModel()
        self.nbytes = rng.choice([64, 400, 80_000, 399_996])
        self.cells: list[tuple[int, ScaleCell]] = []
        self.shown: dict[int, set[int]] = {}
        for _ in range(rng.randint(1, 4)):
            filled = self.nbytes if rng.random() < 0.8 else rng.randint(0, self.nbytes)
            self._add(rng.randrange(len(self.engines)), block, filled)
        for _ in range(rng.randint(1, 14)):
            if rng.random() < 0.6:
                number = rng.randrange(len(self.cells))
                at, source = self.cells[number]
                host = rng.choice([one for one in range(len(self.engines)) if one != at])
                cell = self._add(host, block)
                self.twin.pull(len(self.cells) - 1, number)
                puller, server = self.engines[host], self.engines[at]
                begins = rng.random() * 0.01
                self.timeline.after(begins, puller.pull, cell, server, source.key)
            else:
                host = rng.choice(self.cells)[0]
                near = [k for k, (at, _) in enumerate(self.cells) if at == host]
                sources = rng.choices(near, k=rng.randint(1, 3))
                cell = self._add(host, block)
                self.twin.fold(len(self.cells) - 1, [(k, 4) for k in sources], 4)
                self.engines[host].fold(cell, [self.cells[k][1] for k in sources])

    def _add(self, host: int, block: int, filled: int = 0) -> ScaleCell:
        number = len(self.cells)
        self.twin.cell(number, self.nbytes, filled, block)
        content = number if filled else None
        cell = self.engines[host].cell((number, 0, 0, 0), 0, self.nbytes, content, filled)
        self.cells.append((host, cell))
        self.shown[number] = {filled}
        return cell

    def look(self) -> None:
        for number, (_, cell) in enumerate(self.cells):
            self.shown[number].add(cell.watermark)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 40))
def test_streams_simulated_follow_the_transfer_model(first: int) -> None:
    moved = 0
    for seed in SEEDS[first : first + 40]:
        play = Play(seed)
        promised = {number: set(shown) for number, shown in play.shown.items()}
        for number, watermark in play.twin.run():
            assert isinstance(number, int)
            promised[number].add(watermark)
            moved += 1
        events = 0
        while not play.timeline.run(events, 1e6):
            play.look()
            events += 1
            assert events < EVENTS_MAX, f"seed {seed} does not end"
        play.look()
        for number, (_, cell) in enumerate(play.cells):
            assert cell.watermark == play.twin.watermark(number), f"seed {seed}, cell {number}"
            assert play.shown[number] <= promised[number], f"seed {seed}, cell {number}"
            if cell.watermark:
                expected = play.twin.contributors(number)
                assert cell.content == expected, f"seed {seed}, cell {number}"
    assert moved > 500


def test_partial_pull_in_model_and_simulation_is_equal() -> None:
    twin = transfer_model.TransferModel()
    twin.cell("whole", 100_000, filled=100_000)
    twin.cell("part", 70_000)
    twin.pull("part", "whole")
    assert twin.run()[-1] == ("part", 70_000)
    engine, other = engines()
    other.cell(KEY, 0, 100_000, "whole", 100_000)
    part = engine.cell(None, 0, 70_000)
    engine.pull(part, other, KEY)
    assert engine.network.timeline.run(1000, 1.0)
    assert (part.content, part.watermark) == ("whole", 70_000)


def engines() -> tuple[ScaleEngine, ScaleEngine]:
    network = VirtualNetwork(Timeline(0), 0.0, 0.0)
    one, other = (ScaleEngine(network, network.add(1e9, 1e9), 65536) for _ in range(2))
    return one, other


def test_pull_from_a_wrong_offset_is_detected() -> None:
    engine, other = engines()
    other.cell(KEY, 64, 100, "here", 100)
    engine.pull(engine.cell(None, 0, 100), other, KEY)
    with pytest.raises(WrongPlace, match="arrives at"):
        engine.network.timeline.run(100, 1.0)


def test_pull_beyond_the_source_is_detected() -> None:
    engine, other = engines()
    other.cell(KEY, 0, 100, "here", 100)
    engine.pull(engine.cell(None, 0, 101), other, KEY)
    with pytest.raises(WrongPlace, match="shorter"):
        engine.network.timeline.run(100, 1.0)


@pytest.mark.parametrize("place", [(0, 128), (64, 64)])
def test_fold_of_different_offsets_is_detected(place: tuple[int, int]) -> None:
    engine, _ = engines()
    sources = [engine.cell(None, 0, 64, "here", 64), engine.cell(None, *place, "there", place[1])]
    with pytest.raises(WrongPlace, match="different offsets"):
        engine.fold(engine.cell(None, 0, 64), sources)


def test_cell_closed_too_early_is_detected() -> None:
    engine, other = engines()
    source = other.cell(KEY, 0, 100, "here", 100)
    cell = engine.cell(None, 0, 100)
    with pytest.raises(WrongPlace, match="closed at byte 0"):
        engine.close(cell)
    engine.pull(cell, other, KEY)
    engine.network.timeline.run(1, 1.0)  # it has been asked for
    with pytest.raises(WrongPlace, match="closed at byte 100"):
        other.close(source)
