"""The garbage collector of a worker: put off for the first imports, and for nothing of a user's."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp._worker.preimport import OBJECTS_MAX
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

USUAL = gc.get_threshold()
SEEN = "import gc; seen = gc.get_threshold(), gc.isenabled()\n"
CHOSEN = (321, 7, 6)


def now(*values: Any) -> tuple[Any, ...]:
    return gc.get_threshold(), gc.isenabled()


class Holder:
    def __init__(self) -> None:
        self.found = now()

    def both(self) -> list[Any]:
        return [self.found, now()]


@pytest.fixture(name="module")
def fixture_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """module(name, text): a function of a new module, which only workers import; its result."""

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


class Named:
    """Is read as what it names, so that its reader imports that."""

    def __init__(self, module: str, name: str) -> None:
        self.path = module, name

    def __reduce__(self) -> Any:
        return _value_of, self.path


def _value_of(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(module), name)


def first(value: Any) -> Any:
    return value


def test_it_is_put_off_while_the_first_arguments_are_imported(module: Any) -> None:
    one, two = module("hoplite_gc_one", SEEN), module("hoplite_gc_two", SEEN)
    with hoplite_mp.Cluster(workers=1) as cluster:
        found = cluster.submit(first, Named(one, "seen")).result(PATIENCE_S)
        assert found == ((OBJECTS_MAX, *USUAL[1:]), True)
        assert cluster.submit(now).result(PATIENCE_S) == (USUAL, True)
        assert cluster.submit(first, Named(two, "seen")).result(PATIENCE_S) == (USUAL, True)
    assert one not in sys.modules


def test_user_code_never_finds_it_so() -> None:
    async def later() -> Any:
        return now()

    def some() -> Any:
        yield now()

    with hoplite_mp.Cluster(workers=1) as cluster:
        assert cluster.submit(now).result(PATIENCE_S) == (USUAL, True)
    with hoplite_mp.Cluster(workers=1) as cluster:
        assert cluster.submit(later).result(PATIENCE_S) == (USUAL, True)
        holder = cluster.actor(Holder)
        assert holder.both().result(PATIENCE_S) == [(USUAL, True)] * 2
        with cluster.executor(1, initializer=now) as pool:
            assert pool.submit(now).result(PATIENCE_S) == (USUAL, True)
    with hoplite_mp.Cluster(workers=1) as cluster:
        assert [cluster.get(ref) for ref in cluster.stream(some)] == [(USUAL, True)]
        with cluster.executor(1) as pool:
            assert pool.submit(now).result(PATIENCE_S) == (USUAL, True)


def test_what_an_imported_module_chooses_stays(module: Any) -> None:
    name = module("hoplite_gc_chosen", f"import gc; gc.set_threshold(*{CHOSEN}); value = 1\n")
    off = module("hoplite_gc_off", "import gc; gc.disable(); value = 2\n")
    for text, wanted in ((name, (CHOSEN, True)), (off, (USUAL, False))):
        with hoplite_mp.Cluster(workers=1) as cluster:
            assert cluster.submit(now, Named(text, "value")).result(PATIENCE_S) == wanted
