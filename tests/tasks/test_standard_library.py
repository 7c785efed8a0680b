"""The standard library's own tests of its process pool, with nothing changed but the executor.

They are those of this very interpreter (`test.test_concurrent_futures`), or of a package of the
same version beside it (Debian: libpython3.11-testsuite). What does not pass is listed below with
its reason, and a listed test that begins to pass fails here, so that the list stays true.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import os
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable
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

BROKEN = "demands that one death breaks the whole pool; ours goes on with another worker"
PRIVATE = "reads private attributes of the standard library's pool: "
EXCEPTIONS = {}


class StandInExecutor(hoplite_mp.Executor):
    """Ours, but for `mp_context`, which the tests give to every pool that they make."""

    def __init__(self, *args: Any, mp_context: object = None, **options: Any) -> None:
        super().__init__(*args, **options)


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
def with_our_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tests name the standard library's class, or write programs that do."""
    if FOLDER:
        monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])  # workers import from there, too
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", StandInExecutor, raising=False)
    for module in MODULES:
        if hasattr(module, "assert_python_ok"):
            run = functools.partial(run_of_ours, module.assert_python_ok)
            monkeypatch.setattr(module, "assert_python_ok", run)


def run_of_ours(run: Callable[..., Any], flag: str, program: str) -> Any:
    program = program.replace(f"test.{SUITE}", MODULES[0].__name__)
    program = program.replace("from concurrent.futures import StandInExecutor", "pass")
    return run(flag, STAND_IN.format(path=[FOLDER] * bool(FOLDER)) + program)


def adopt(cls: type) -> type:
    """The same tests, with our executor; those of the list are expected to fail."""
    members: dict[str, Any] = {"executor_type": StandInExecutor}
    for name in dir(cls):
        reason = EXCEPTIONS.get(name)
        if reason is not None:
            members[name] = expected_to_fail(getattr(cls, name), reason)
    return type(cls.__name__.replace(PREFIX, "Hoplite"), (cls,), members)


def expected_to_fail(method: Any, reason: str) -> Any:
    def test(self: Any) -> None:
        method(self)

    return pytest.mark.xfail(reason=reason, strict=True)(test)


for _module in MODULES:
    for _name, _cls in list(vars(_module).items()):
        if _name.startswith(PREFIX) and _name.endswith("Test"):
            globals()[_name.replace(PREFIX, "Hoplite")] = adopt(_cls)


def test_every_listed_test_is_there() -> None:
    there = {name for cls in globals().values() if isinstance(cls, type) for name in dir(cls)}
    assert set(EXCEPTIONS) <= there
    assert len([name for name in there if name.startswith("test_")]) > 40
