"""Files, lines and source text of functions by value, as tracebacks and warnings show them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._serialize import sources
from tests.support.notebook_cells import CELLS, EXPECTED_OF_CELLS
from tests.support.processes import run_program, run_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


PROGRAM = """
import sys, traceback, concurrent.futures, multiprocessing
import hoplite_mp

def fail(x):
    numbers = [x]
    return inner(  # a call of two lines
        numbers)

def inner(numbers):
    raise LookupError(numbers)

class Model:
    @staticmethod
    def run(x):
        return (lambda y: fail(y))(x)

def frames(pool, *call):
    error = pool.submit(*call).exception()
    text = str(error.__cause__)
    lines = [line for line in text.splitlines() if line.startswith("  ") and "^" not in line]
    # The standard pool's own frame is the first one.
    return [line for line in lines if "process.py" not in line and "call_item" not in line]

fork = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as standard:
    expected = frames(standard, fail, 1), frames(standard, Model.run, 1)
with hoplite_mp.Cluster(1) as c, hoplite_mp.Executor(1) as ours:
    for pool in (c, ours):
        found = frames(pool, fail, 1), frames(pool, Model.run, 1)
        print(found == expected or (found, expected))
print(len(expected[1]), expected[1][-1].strip())
"""


def test_traceback_of_script_function_is_that_of_standard_pool(tmp_path: Path) -> None:
    assert run_script(tmp_path, PROGRAM).splitlines() == [
        "True",
        "True",
        # Since Python 3.13 both lines of a call are shown.
        f"{8 + (sys.version_info >= (3, 13))} raise LookupError(numbers)",
    ]


def test_source_of_cell_without_file_is_shown() -> None:
    assert (
        run_program(CELLS + "with hoplite_mp.Cluster(2) as c: tell(c)\n").splitlines()
        == EXPECTED_OF_CELLS
    )


def test_source_of_initializer_and_stack_dump_is_shown(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        """
        import hoplite_mp, sys, threading, time
        from hoplite_mp._cli.dump import collect, lines

        def init(x):
            return 1 / x

        def hang(path):
            while not open(path, "a").close(): time.sleep(0.01)

        with hoplite_mp.Cluster(1) as c:
            try:
                with c.executor(1, initializer=init, initargs=(0,)) as ex:
                    ex.submit(abs, 1).result()
            except Exception as error:
                print("return 1 / x" in str(error.__cause__) or repr(error.__cause__))
            import os, tempfile
            path = tempfile.mktemp()
            future = c.submit(hang, path)
            while not os.path.exists(path):
                time.sleep(0.01)
            os.unlink(path)
            dumped = collect(c, stacks=True)
            print(f'File "{__file__}", line ' in str(dumped))
            print('while not open(path, "a").close(): time.sleep' in "".join(lines(dumped)))
            future.cancel(force=True)
        """,
    )
    assert out.splitlines() == ["True", "True", "True"]


TEXT = [
    "import os\n",
    "\n",
    "@one(\n",
    "    1\n",
    ")\n",
    "@two\n",
    "class A:\n",
    "    x = 1\n",
    "    def f(self):\n",
    "        return 1\n",
    "\n",
    "y = 1\n",
]


def test_statement_around_lines_includes_decorators() -> None:
    assert sources._statement(TEXT, 9, 10) == (6, 10)
    assert sources._statement(TEXT, 12, 12) == (12, 12)


@pytest.fixture
def linecache_restored() -> Iterator[None]:
    import linecache

    before = dict(linecache.cache)
    sources._files.clear()
    yield
    linecache.cache.clear()
    linecache.cache.update(before)
    sources._files.clear()


@pytest.mark.usefixtures("linecache_restored")
def test_lines_of_one_file_are_merged_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import linecache

    sources.keep_source(("f.py", 3, "c\nd\n"))
    sources.keep_source(("f.py", 1, "a\n"))
    assert linecache.getlines("f.py") == ["a\n", "\n", "c\n", "d\n"]
    sources.keep_source(("f.py", 3, "C\n"))
    linecache.checkcache("f.py")
    assert linecache.getline("f.py", 3) == "C\n"
    linecache.cache["own.py"] = 1, None, ["mine\n"], "own.py"
    sources.keep_source(("own.py", 1, "theirs\n"))
    assert linecache.getline("own.py", 1) == "mine\n"
    linecache.clearcache()
    sources.keep_source(("f.py", 3, "C\n"))
    assert linecache.getline("f.py", 3) == "C\n"
    monkeypatch.setattr(sources, "FILES_MAX", 2)
    sources.keep_source(("g.py", 1, "g\n"))
    sources.keep_source(("h.py", 1, "h\n"))
    assert "f.py" not in linecache.cache
    assert len(sources._files) == 2


@pytest.mark.usefixtures("linecache_restored")
def test_long_statement_brings_own_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import linecache

    text = "def outer():\n    x = 1\n    def inner():\n        return x\n    return inner\n"
    linecache.cache["long.py"] = len(text), None, text.splitlines(True), "long.py"
    scope: dict[str, object] = {}
    exec(compile(text, "long.py", "exec"), scope)
    inner = scope["outer"]()  # type: ignore[operator]
    assert sources.source_of(inner.__code__) == ("long.py", 1, text)
    monkeypatch.setattr(sources, "BLOCK_CHARS_MAX", 50)
    sources._known.clear()
    expected = "    def inner():\n        return x\n"
    assert sources.source_of(inner.__code__) == ("long.py", 3, expected)
