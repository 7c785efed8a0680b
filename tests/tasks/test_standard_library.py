"""The standard library's own tests of its process pool, with nothing changed but the executor.

They are those of this very interpreter (`test.test_concurrent_futures`), or of a package of the
same version beside it (Debian: libpython3.11-testsuite). What does not pass is listed below with
its reason, and a listed test that begins to pass fails here, so that the list stays true. That, and
tests that sleep for seconds, are for `make soak`: each starts a pool of five workers or two.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import os
import pkgutil
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

SUITE = "test_concurrent_futures"
VERSION = "python{}.{}".format(*sys.version_info)
FOLDERS = [
    os.environ.get("HOPLITE_MP_STANDARD_TESTS", ""),
    f"/usr/lib/{VERSION}/test",
    f"/usr/lib64/{VERSION}/test",
    f"/usr/local/lib/{VERSION}/test",
]
# Their classes come for each way of starting processes; workers of ours are like spawned ones.
PREFIX = "ProcessPoolSpawn"

BROKEN = "demands that an exception while something is unpickled breaks the pool; ours gives it"
PRIVATE = "reads what is private to the standard library's pool: "
PREFIXED = "what workers print begins with their name, (worker 1@h0)"
KILLING = "Executor.kill_workers and terminate_workers, of Python 3.14, are not in our API"
EXCEPTIONS = {
    "FailingInitializer.test_initializer": PRIVATE + "_broken",
    "test_context_manager_shutdown": PRIVATE + "_processes",
    "test_del_shutdown": PRIVATE + "_executor_manager_thread",
    "test_error_at_task_unpickle": BROKEN,
    "test_error_during_result_unpickle_in_result_handler": BROKEN,
    "test_exit_at_task_unpickle": BROKEN,
    "test_exit_during_result_unpickle_in_result_handler": BROKEN,
    "test_idle_process_reuse_multiple": PRIVATE + "_processes",
    "test_idle_process_reuse_one": PRIVATE + "_processes",
    "test_interpreter_shutdown": PREFIXED,
    "test_killed_child": PRIVATE + "_processes",
    "test_max_tasks_per_child": PRIVATE + "_processes",
    "test_max_tasks_per_child_defaults_to_spawn_context": PRIVATE + "_mp_context",
    "test_processes_terminate": PRIVATE + "_processes",
    "test_saturation": PRIVATE + "_processes",
    "test_shutdown_deadlock_pickle": PRIVATE + "_executor_manager_thread",
    "test_shutdown_no_wait": PRIVATE + "_executor_manager_thread",
    "test_submit_after_interpreter_shutdown": "ours closes in an exit function of its own: "
    "one that was registered after the import runs before it and may still submit",
    "test_traceback": PRIVATE + "_RemoteTraceback",
}
# The same, of tests that not all versions of Python have.
LATER = {
    "test_broken_process_pool_traceback": PRIVATE + "_processes",
    "test_failed_worker_replacement_breaks_pool": PRIVATE + "_executor_manager_thread",
    "test_force_shutdown_during_max_tasks_worker_exit": PRIVATE + "_executor_manager_thread",
    "test_force_shutdown_workers": PRIVATE + "_processes",
    "test_force_shutdown_workers_dead_workers": KILLING,
    "test_force_shutdown_workers_invalid_op": PRIVATE + "_force_shutdown",
    "test_force_shutdown_workers_not_started_yet": KILLING,
    "test_force_shutdown_workers_stops_pool": PRIVATE + "_processes",
    "test_gc_during_max_tasks_worker_exit_gh152967": PRIVATE + "_executor_manager_thread",
    "test_hang_gh83386": PREFIXED,
    "test_kill_workers": KILLING,
    "test_map_buffersize_value_validation": "the message of our ValueError names the argument",
    "test_python_finalization_error": "replaces a function of threading for the standard pool",
    "test_shutdown_gh_132969_case_1": PRIVATE + "_executor_manager_thread",
    "test_shutdown_gh_132969_case_2": PRIVATE + "_executor_manager_thread",
    "test_shutdown_no_wait_max_tasks_gh119592": PRIVATE + "_executor_manager_thread",
    "test_terminate_workers": KILLING,
    "test_traceback_when_child_process_terminates_abruptly": PRIVATE + "_RemoteTraceback",
}
# It asserts that one of the tasks just sent has begun, so that it is not cancelled: a race.
RACES = {"test_cancel_futures": "ours cancels all that has not begun, perhaps every one of them"}
# They sleep for two to six seconds each; test_standard_suite.py has what they ask for without that.
SLEEPERS = {
    "test_duplicate_futures",
    "test_first_completed_some_already_completed",
    "test_first_exception",
    "test_first_exception_one_already_failed",
    "test_first_exception_some_already_complete",
    "test_map_timeout",
    "test_timeout",
    "test_zero_timeout",
}
GONE = {"test_zero_timeout"}  # from later versions
# They would leave an object behind whose __del__ fails when the tests are over.
_made: list[StandInExecutor] = []


class StandInExecutor(hoplite_mp.Executor):
    """Ours, but for `mp_context`, which the tests give to every pool that they make."""

    def __init__(self, *args: Any, mp_context: object = None, **options: Any) -> None:
        super().__init__(*args, **options)
        _made.append(self)


STAND_IN = """
import hoplite_mp, sys
sys.path += {path!r}
class StandInExecutor(hoplite_mp.Executor):
    def __init__(self, *args, mp_context=None, **options):
        super().__init__(*args, **options)
"""


def the_suite() -> tuple[list[ModuleType], str]:
    """Its modules, and the folder that they are found in, if they are not the interpreter's own."""
    try:
        return with_submodules(importlib.import_module(f"test.{SUITE}")), ""
    except ImportError:
        pass
    for folder in FOLDERS:
        if any(os.path.exists(os.path.join(folder, SUITE + end)) for end in (".py", "/util.py")):
            sys.path.append(folder)
            try:
                return with_submodules(importlib.import_module(SUITE)), folder
            finally:
                sys.path.remove(folder)
    pytest.skip(
        f"this interpreter comes without test.{SUITE}, and none of its version is installed "
        f"(Debian: lib{VERSION}-testsuite); HOPLITE_MP_STANDARD_TESTS may name its folder",
        allow_module_level=True,
    )


def with_submodules(package: ModuleType) -> list[ModuleType]:
    names = [found.name for found in pkgutil.iter_modules(getattr(package, "__path__", []))]
    return [package, *(importlib.import_module(f"{package.__name__}.{name}") for name in names)]


MODULES, FOLDER = the_suite()


@pytest.fixture(autouse=True)
def with_our_executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some tests name the standard library's class, or write programs that do."""
    if FOLDER:
        monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])  # workers import from there, too
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", StandInExecutor, raising=False)
    for module in MODULES:
        if hasattr(module, "assert_python_ok"):
            run = functools.partial(run_of_ours, module.assert_python_ok)
            monkeypatch.setattr(module, "assert_python_ok", run)
    yield
    while _made:  # some are left to the collector of garbage
        _made.pop().shutdown(cancel_futures=True)


def run_of_ours(run: Callable[..., Any], flag: str, program: str) -> Any:
    program = program.replace(f"test.{SUITE}", MODULES[0].__name__)
    program = program.replace("from concurrent.futures import StandInExecutor", "pass")
    return run(flag, STAND_IN.format(path=[FOLDER] * bool(FOLDER)) + program)


def adopt(name: str, cls: type) -> type:
    """The same tests, with our executor; those of the list are expected to fail."""
    members: dict[str, Any] = {"executor_type": StandInExecutor}
    for test in dir(cls):
        listed = EXCEPTIONS | LATER
        reason = listed.get(f"{name}.{test}", listed.get(test))
        if reason is not None:
            failing = marked(getattr(cls, test), pytest.mark.xfail(reason=reason, strict=True))
            members[test] = pytest.mark.soak(failing)
        elif test in RACES:
            mark = pytest.mark.xfail(reason=RACES[test], strict=False)
            members[test] = marked(getattr(cls, test), mark)
        elif test in SLEEPERS:
            members[test] = marked(getattr(cls, test), pytest.mark.soak)
    return type(f"{name}Test", (cls,), members)


def marked(method: Any, mark: pytest.MarkDecorator) -> Any:
    def test(self: Any) -> None:
        try:
            method(self)
        except Exception as error:
            # Its frames, and its queue, would hold semaphores until after the checks of what stays.
            traceback.clear_frames(error.__traceback__)
            for name in ("log_queue", "executor_kwargs"):
                vars(self).pop(name, None)
            raise

    return mark(test)


def adopted() -> Iterator[type]:
    for module in MODULES:
        for name, cls in vars(module).items():
            if name.startswith(PREFIX) and name.endswith("Test"):
                yield adopt(name.removeprefix(PREFIX).removesuffix("Test"), cls)


globals().update({cls.__name__: cls for cls in adopted()})


def test_every_listed_test_is_there() -> None:
    classes = [cls for cls in globals().values() if getattr(cls, "executor_type", None)]
    there = {name for cls in classes for name in dir(cls) if name.startswith("test_")}
    assert {name.rpartition(".")[2] for name in (*EXCEPTIONS, *RACES, *SLEEPERS)} - there <= GONE
    assert len(there) > 50
