"""Failed tasks whose errors nobody reads: one report at the end, and none for what was read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp._client import failures
from hoplite_mp._client.closing import Unread
from tests.lan import forked
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster


def fail(number: int) -> None:
    raise ValueError(f"number {number}")


def quiet(number: int) -> None:
    raise KeyError(number)


def wait_and_fail(path: Path) -> None:
    wait_for(path)
    raise KeyError(1)


class Fails:
    def method(self) -> None:
        raise OSError("of an actor")

    def fine(self) -> int:
        return 1


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one for one in caplog.records if one.name == "hoplite_mp"]
    assert all(one.levelno == logging.WARNING for one in found)
    return [one.getMessage() for one in found]


class Holder:
    """A value in which `submit` does not look for refs."""

    def __init__(self, ref: object) -> None:
        self.ref = ref


def kind_inside(holder: Holder) -> str:
    return type(holder.ref).__name__


def test_a_ref_of_another_cluster_inside_a_value_is_stored_and_sent() -> None:
    with hoplite_mp.Cluster(workers=1) as cluster, hoplite_mp.Cluster(workers=1) as other:
        holder = Holder(other.put(1))
        assert cluster.submit(kind_inside, holder).result(PATIENCE_S) == "ObjectRef"
        assert cluster.get(cluster.put([holder]), PATIENCE_S)[0].ref == holder.ref


def test_unread_failures_are_reported_once_with_three_tracebacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        for number in range(5):  # one by one: tracebacks are in the order of completions
            eventually(cluster.submit(fail, number).done)
        cluster.submit(quiet, 0)
        cluster.submit(abs, -1)
        cluster.options(retries=0).submit(os._exit, 3)
        actor = cluster.actor(Fails)
        actor.method()
        assert actor.fine().result(PATIENCE_S) == 1
        assert not reports(caplog)
    (text,) = reports(caplog)
    assert text.startswith("8 tasks failed, and the program has not read the errors:\n")
    assert text.count("Traceback (most recent call last)") == 3
    for number in range(3):
        assert f"ValueError: number {number}" in text
    assert "fail() in worker" in text
    last = text.splitlines()[-1]
    assert all(
        part in last for part in ("fail() (2)", "quiet() (1)", "method() (1)", "_exit() (1)")
    )


async def awaits(c: Cluster) -> None:
    await c.submit(quiet, 1)


async def wraps(c: Cluster) -> None:
    await asyncio.wrap_future(c.submit(quiet, 1))


async def maps(c: Cluster) -> None:
    async for _ in c.map(quiet, range(9), chunksize=2):
        pass


def reduces(c: Cluster) -> None:
    c.get(c.reduce([c.submit(quiet, 1), c.submit(quiet, 2), c.put(1)], num=2))


def takes_refs(refs: list[Any]) -> None:
    hoplite_mp.current().get(refs)


READS: dict[str, Callable[[Cluster], Any]] = {
    "result": lambda c: c.submit(quiet, 1).result(),
    "exception": lambda c: c.submit(quiet, 1).exception(),
    "get": lambda c: c.get(c.submit(quiet, 1)),
    "get of a ref": lambda c: c.get(c.submit(quiet, 1).ref),
    "get of several": lambda c: c.get([c.submit(quiet, n) for n in range(3)]),
    "get of a nest": lambda c: c.get({"a": [c.submit(quiet, n) for n in range(3)]}),
    "await": lambda c: asyncio.run(awaits(c)),
    "wrap_future": lambda c: asyncio.run(wraps(c)),
    "argument": lambda c: c.submit(abs, c.submit(quiet, 1)).exception(),
    "argument by ref": lambda c: c.submit(
        takes_refs, hoplite_mp.by_ref([c.submit(quiet, n) for n in range(3)])
    ).exception(),
    "in an object": lambda c: c.submit(takes_refs, c.put([c.submit(quiet, 1).ref])).exception(),
    "map": lambda c: list(c.map(quiet, range(40), chunksize=1)),
    "map of chunks": lambda c: list(c.map(quiet, range(40), chunksize=3)),
    "map, any order": lambda c: list(c.map(quiet, range(40), ordered=False, chunksize=1)),
    "map in a loop": lambda c: asyncio.run(maps(c)),
    "map that returns them": lambda c: list(c.map(quiet, range(9), return_exceptions=True)),
    "map that nobody reads": lambda c: c.map(quiet, range(9)).close(),
    "stream": lambda c: list(c.stream(quiet, 1)),
    "run": lambda c: c.run(quiet, 1),
    "reduce": reduces,
    "cancel": lambda c: c.submit(quiet, 1).cancel(force=True),
    "callback": lambda c: c.submit(quiet, 1).add_done_callback(lambda one: one.exception()),
}


def test_failures_that_were_read_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with hoplite_mp.Cluster(workers=2) as cluster:
        for read in READS.values():
            with contextlib.suppress(KeyError, hoplite_mp.ReduceError):
                read(cluster)
    assert reports(caplog) == []


def test_failure_that_can_still_be_read_is_reported_when_the_program_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        future = cluster.submit(quiet, 1)
    assert reports(caplog) == []
    assert type(future.exception()) is KeyError
    program = """
        import hoplite_mp, logging, os
        logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
        def fail(number):
            raise ValueError(number)
        with hoplite_mp.Cluster(workers=1) as c:
            later, never = c.submit(fail, 1), c.submit(fail, 2)
        if not os.fork():
            raise SystemExit  # its exit functions run, too
        os.wait()
        later.exception()
        pool = hoplite_mp.Executor(max_workers=1)
        pool.submit(fail, 3)
        pool.submit(abs, fail)
    """
    done = forked.run([sys.executable, "-c", textwrap.dedent(program)], timeout=PATIENCE_S * 2)
    done.check_returncode()
    assert done.stderr.count("WARNING hoplite_mp") == 2
    assert "1 task failed, and the program has not read the error:" in done.stderr
    assert "ValueError: 2" in done.stderr
    assert "ValueError: 1" not in done.stderr
    assert "2 tasks failed" in done.stderr
    assert "ValueError: 3" in done.stderr


def test_program_that_fails_reports_earlier_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def use() -> None:
        with hoplite_mp.Cluster(workers=1) as cluster:
            done = cluster.submit(fail, 7)
            eventually(done.done)
            del done
            cluster.submit(os.kill, os.getpid(), 0)  # is cancelled, or not
            actor = cluster.actor(Fails)
            actor.fine()
            raise RuntimeError("the program")

    with pytest.raises(RuntimeError, match="the program"):
        use()
    (text,) = reports(caplog)
    assert text.startswith("1 task failed")
    assert "number 7" in text


def test_pickling_error_of_an_executor_that_nobody_reads_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    with hoplite_mp.Executor(max_workers=1) as pool:
        pool.submit(id, Refuses())
        assert isinstance(pool.submit(id, Refuses()).exception(), TypeError)
    (text,) = reports(caplog)
    assert text.startswith("1 task failed")
    assert "not this one" in text


def test_failure_read_while_another_thread_notes_it_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster, ThreadPoolExecutor(1) as reader:
        failures = cluster._runtime.submitter.failures
        found: list[BaseException | None] = []

        class Tasks:
            """Another thread reads the failure in the middle of the first `note`."""

            def name(self, oid: int) -> str:
                monkeypatch.undo()
                found.append(reader.submit(cluster.get, ref).exception(PATIENCE_S))
                return "quiet"

        ref = cluster.submit(wait_and_fail, tmp_path / "go").ref
        monkeypatch.setattr(failures, "_tasks", Tasks())
        (tmp_path / "go").touch()
        eventually(lambda: cluster._runtime.submitter.drain() or found)
        assert [type(one) for one in found] == [KeyError]
    assert reports(caplog) == []


class SlowUnread(Unread):
    """The thread that adds a Future holds it for a while."""

    def append(self, future: Any, /) -> None:
        time.sleep(0.3)
        super().append(future)


def test_cluster_that_ends_while_the_collector_holds_futures_keeps_and_reports_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        submitter = cluster._runtime.submitter
        for fn in (fail, abs):
            submitter._unread = SlowUnread()
            future: Any = cluster.submit(fn, 7)
            if fn is fail:
                del future
            submitter.collector.look_soon()
            eventually(lambda: not submitter.pending)
    assert future.result() == 7
    (text,) = reports(caplog)
    assert text.startswith("1 task failed")


def test_failures_of_many_ended_clusters_are_not_kept_until_the_program_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "CLUSTERS_MAX", 1)
    monkeypatch.setattr(failures, "_later", [])
    kept = []
    for number in range(3):
        with hoplite_mp.Cluster(workers=1) as cluster:
            kept.append(cluster.submit(fail, number))
            cluster.wait(kept[-1])
        if number == 1:
            assert isinstance(kept[1].exception(), ValueError)
    assert len(failures._later) == 1
    texts = reports(caplog)
    assert len(texts) == 1
    assert "number 0" in texts[0]
    assert isinstance(kept[2].exception(), ValueError)  # is not reported when the program ends


# -- tasks that tasks have submitted --------------------------------------------------------------


def output_of(program: str) -> str:
    """What a program, and the workers that its tasks use, print to stderr."""
    beginning = """
        import contextlib, hoplite_mp
        from tests.tasks.test_unread_failures import READS, Fails, eventually, fail, quiet
        c = hoplite_mp.Cluster(workers=2, memory="256MiB")
    """
    command = [sys.executable, "-c", textwrap.dedent(beginning) + textwrap.dedent(program)]
    done = forked.run(command, cwd=Path(__file__).parents[2], timeout=PATIENCE_S * 2)
    done.check_returncode()
    return done.stderr


@pytest.mark.parametrize("where", ["pool", "executor", "actor"])
def test_unread_failure_of_a_nested_task_is_reported_when_its_worker_ends(where: str) -> None:
    found = output_of(f"""
        class Outer:
            def method(self, number):
                c = hoplite_mp.current()
                dropped = c.submit(fail, number)
                self.kept = c.submit(fail, number + 1)
                with contextlib.suppress(ValueError):
                    c.submit(fail, number + 2).result()
                eventually(self.kept.done)
                eventually(dropped.done)
        def outer(number):
            Outer().method(number)
        with c:
            if {where!r} == "pool":
                c.submit(outer, 7).result()
            elif {where!r} == "executor":
                with c.executor(2) as pool:
                    pool.submit(outer, 7).result()
            else:
                c.actor(Outer).method(7).result()
    """)
    assert found.count("tasks failed, and the program has not read the errors:") == 1
    assert "2 tasks failed" in found
    assert "ValueError: number 7" in found
    assert "ValueError: number 8" in found
    assert "ValueError: number 9" not in found
    assert all(line.startswith("(") for line in found.splitlines()), "workers print all of it"


def test_failures_that_nested_code_has_read_or_passed_on_are_not_reported() -> None:
    found = output_of("""
        def reads(name):
            with contextlib.suppress(KeyError, hoplite_mp.ReduceError):
                READS[name](hoplite_mp.current())
        def passes_on():
            c = hoplite_mp.current()
            return c.submit(quiet, 1), [c.submit(quiet, 2).ref]
        def yields():
            yield hoplite_mp.current().submit(quiet, 3)
        def ends_with_it():
            error = RuntimeError("holds a ref")
            error.ref = hoplite_mp.current().submit(quiet, 4).ref
            raise error
        class Holder:
            def make(self):
                self.kept = hoplite_mp.current().submit(quiet, 5)
                return self.kept
        with c:
            for name in READS:
                c.submit(reads, name).result()
            future, (ref,) = c.submit(passes_on).result()
            (item,) = c.get(list(c.stream(yields)))
            error = c.submit(ends_with_it).exception()
            for one in (future, ref, item, error.ref, c.actor(Holder).make().result()):
                with contextlib.suppress(KeyError):
                    c.get(one)
                    raise AssertionError
    """)
    assert found == ""


def test_nested_tasks_that_the_end_of_the_cluster_kills_are_not_reported(tmp_path: Path) -> None:
    found = output_of(f"""
        import pathlib, time
        folder = pathlib.Path({str(tmp_path)!r})
        def inner(name):
            (folder / name).touch()
            while True:  # an interrupt does not end it
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(60)
        def outer():
            both = [hoplite_mp.current().submit(inner, name) for name in "ab"]
            both[0].result()
        with contextlib.suppress(ZeroDivisionError), c:
            c.submit(outer)
            eventually(lambda: len(list(folder.iterdir())) == 2)
            1 / 0
    """)
    assert "has not read" not in found
