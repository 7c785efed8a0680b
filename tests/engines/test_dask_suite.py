"""Dask's own tests of its local schedulers, with `pool=` an executor of this library.

They come with the installed dask (`dask/tests`). What does not pass is listed with its reason, and
a listed test that begins to pass fails here, so the list stays true. None of the others asks
for a pool.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import dask
import pytest

import hoplite_mp

ROOT = Path(__file__).resolve().parents[2]
FILES = ("test_threaded.py", "test_multiprocessing.py", "test_local.py")
PASSED_MIN = 50

IGNORED = "dask says itself that it ignores initializer= where a pool is given"
THREADS = "asks for threads of one process: its tasks share a lock and context variables"
EXCEPTIONS = {
    "test_process_initializer[threading-None-expected_results0]": IGNORED,
    "test_process_initializer[processes-proc_init-expected_results2]": IGNORED,
    "test_custom_context_used_python3_posix": "asks for a process of a given start method",
    "test_contextvars[None]": THREADS,
    "test_contextvars[1]": THREADS,
    "test_context_aware_warnings[None]": THREADS,
    "test_context_aware_warnings[1]": THREADS,
}
CONFTEST = """
import dask
import hoplite_mp
import pytest

@pytest.fixture(scope="session")
def pool():
    with hoplite_mp.{made} as made:
        yield made

@pytest.fixture(autouse=True)
def used(pool):
    with dask.config.set(pool=pool):
        yield
"""


@pytest.mark.parametrize("made", ["Executor(2)", "Cluster(workers=2)"])
def test_with_an_executor_as_its_pool(made: str, tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(Path(dask.__file__).parent / "tests" / name, tmp_path)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(made=made))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=found.xml"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    passed, failed = set(), set()
    for case in ElementTree.parse(tmp_path / "found.xml").iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.add(case.get("name"))
        elif "skipped" not in kinds:
            passed.add(case.get("name"))
    assert failed == set(EXCEPTIONS), done.stdout[-5000:]
    assert len(passed) >= PASSED_MIN


def test_how_many_workers_dask_sees() -> None:
    with hoplite_mp.Executor(3) as executor:
        assert executor._max_workers == 3
    with hoplite_mp.Cluster(workers=2) as c:
        assert c._max_workers == 2
        assert c.options(name="x")._max_workers == 2
        with c.executor(1) as one:
            assert one._max_workers == 1
        c.add_workers(1)
        assert c._max_workers == 3
    with hoplite_mp.Executor(2, initializer=abs, initargs=(1,)) as executor:
        assert executor._max_workers == 2
