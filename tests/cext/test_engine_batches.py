"""Cells that are told of together, and commands that wake the engine's thread once."""

from __future__ import annotations

import random
import select
import threading

import pytest

from hoplite_mp import _engine
from hoplite_mp._engine import CLOSED, FILLED
from tests.support.engine_hosts import EngineHost

NBYTES = 1000


@pytest.fixture
def engine() -> _engine.Engine:
    """Without a thread, so that nothing happens between two steps."""
    return _engine.Engine(1, threaded=False)


def told(engine: _engine.Engine) -> list[tuple[int, int]]:
    engine.step()
    return [event[:2] for event in engine.events()]


def cells(engine: _engine.Engine, count: int) -> list[int]:
    return [engine.cell(None, bytearray(NBYTES)) for _ in range(count)]


def test_a_batch_is_told_when_its_last_cell_is_full(engine: _engine.Engine) -> None:
    first, second, third, alone = cells(engine, 4)
    engine.together([first, second, third])
    for cell in (second, alone, first):
        engine.advance(cell, NBYTES)
    assert told(engine) == [(FILLED, alone)]
    engine.advance(third, NBYTES)
    assert sorted(told(engine)) == [(FILLED, cell) for cell in (first, second, third)]
    engine.together([first, second])  # they were told
    assert told(engine) == []


def test_a_cell_that_is_closed_ends_its_batch(engine: _engine.Engine) -> None:
    full, empty, closed = cells(engine, 3)
    engine.together([full, empty, closed])
    engine.advance(full, NBYTES)
    assert told(engine) == []
    engine.close(closed)
    assert told(engine) == [(FILLED, full), (CLOSED, closed)]
    engine.advance(empty, NBYTES)
    assert told(engine) == [(FILLED, empty)]


def test_a_cell_that_is_put_together_with_others_ends_the_batch_before(
    engine: _engine.Engine,
) -> None:
    full, empty, other = cells(engine, 3)
    engine.together([full, empty])
    engine.advance(full, NBYTES)
    engine.together([empty, other])
    assert told(engine) == [(FILLED, full)]
    engine.advance(empty, NBYTES)
    assert told(engine) == []
    engine.together([])
    engine.together([empty])  # it is told by itself
    assert told(engine) == [(FILLED, empty)]


def test_what_fills_itself_is_told_in_batches_too(engine: _engine.Engine) -> None:
    source, total, copy = cells(engine, 3)
    engine.fold(total, [source], "sum", "uint8")
    engine.together([total, copy])
    engine.advance(source, NBYTES)
    assert told(engine) == [(FILLED, source)]
    engine.advance(copy, NBYTES)
    assert sorted(told(engine)) == [(FILLED, total), (FILLED, copy)]


@pytest.mark.parametrize("seed", range(20))
def test_every_cell_is_told_once(engine: _engine.Engine, seed: int) -> None:
    """Whatever is put together, and closed, and filled in whatever order."""
    chance = random.Random(seed)
    every = cells(engine, 30)
    living, said = list(every), []
    full: set[int] = set()
    for _ in range(300):
        what = chance.random()
        if what < 0.2 and living:
            engine.together(chance.sample(living, chance.randint(0, min(6, len(living)))))
        elif what < 0.25 and living:
            cell = living.pop(chance.randrange(len(living)))
            engine.close(cell)
        elif what < 0.5 and living:
            cell = chance.choice(living)
            full.add(cell)
            engine.advance(cell, NBYTES)
        else:
            said += told(engine)
    for cell in living:
        engine.close(cell)
    said += told(engine)
    assert sorted(cell for kind, cell in said if kind == FILLED) == sorted(full)
    assert sorted(cell for kind, cell in said if kind == CLOSED) == every


def test_what_is_asked_while_commands_are_held_is_done_after_the_release() -> None:
    host = EngineHost()
    host.engine.hold()
    host.engine.hold()
    cell = host.engine.cell(None, bytearray(NBYTES))
    host.engine.advance(cell, NBYTES)
    host.engine.release()
    assert not select.select([host.engine.fileno()], [], [], 0.05)[0]
    assert host.engine.watermark(cell) == 0
    host.engine.release()
    host.filled(cell)
    host.engine.stop()


def test_links_do_not_wait_while_commands_are_held() -> None:
    """What is not about cells wakes the thread, and takes what was held along."""
    host = EngineHost()
    host.engine.hold()
    cell = host.engine.cell(None, bytearray(NBYTES))
    host.engine.advance(cell, NBYTES)
    driver = host.engine.drive(5)
    host.filled(cell)
    host.engine.disconnect(driver.link)
    host.wait_for(_engine.LINK_LOST, driver.link)
    host.engine.release()
    host.engine.stop()


def test_an_engine_that_is_stopped_while_commands_are_held_ends() -> None:
    host = EngineHost()
    host.engine.hold()
    cell = host.engine.cell(None, bytearray(NBYTES))
    host.engine.together([cell])
    host.engine.stop()


def test_holds_of_one_thread_keep_back_no_command_of_another_for_ever() -> None:
    host = EngineHost()
    filled: list[int] = []

    def work() -> None:
        for _ in range(200):
            host.engine.hold()
            cell = host.engine.cell(None, bytearray(NBYTES))
            host.engine.advance(cell, NBYTES)
            filled.append(cell)
            host.engine.release()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for cell in filled:
        host.filled(cell)
    host.engine.stop()


def test_numbers_of_cells_that_are_not_open_are_refused(engine: _engine.Engine) -> None:
    (cell,) = cells(engine, 1)
    engine.close(cell)
    with pytest.raises(KeyError):
        engine.together([cell])
    engine.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        engine.hold()
