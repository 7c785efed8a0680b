"""joblib's own tests of Parallel and its backends, with the name of one backend changed.

They come with the installed joblib (`joblib.test.test_parallel`). Where they say "loky" they run
with "hoplite_mp"; what concerns the other backends alone is left out. What does not pass is listed
below with its reason, and a listed test that begins to pass fails here, so the list stays true.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import multiprocessing
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import joblib
import pytest
from joblib.parallel import BACKENDS, ParallelBackendBase

import hoplite_mp.integrations.joblib as ours
from hoplite_mp.integrations import _joblib_pools

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITE = "joblib.test.test_parallel"
NAME = "hoplite_mp"
# Of generators that the tests drop, and of what joblib itself does.
pytestmark = [
    pytest.mark.soak,  # two minutes; test_joblib.py has what is promised
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:.*tasks which were still being processed"),
]

MEMMAP = "asks for numpy.memmap: arrays come out of the store, not out of files"
LOKY = "reads what is private to loky: "
EXCEPTIONS = {
    "test_auto_memmap_on_arrays_from_generator": MEMMAP,
    "test_error_capture": LOKY + "_workers",
    "test_memmapping_leaks": MEMMAP,
    "test_nested_backend_in_sequential": "demands 1 job where none is named: ours takes all "
    "workers, as the backends dask and ray do",
    "test_parallel_with_interactively_defined_bound_method_loky": LOKY + "its log",
}
CHANGES = {
    r'"loky"': f'"{NAME}"',
    r"^    LokyBackend,\n": "",
    r"joblib._parallel_backends.LokyBackend": "LokyBackend",
    r"^import joblib$": "import joblib\nfrom hoplite_mp.integrations.joblib "
    "import HopliteBackend as LokyBackend",
    r"from joblib.externals.loky import get_reusable_executor": "get_reusable_executor = Reusable",
    # Programs that the tests write and run.
    r"^from joblib import (Parallel, delayed.*)$": r"from joblib import \1\n"
    "import hoplite_mp.integrations.joblib",
    # With loky, the end of one call takes the workers of the other away.
    r'"hoplite_mp", True\),\n        \("threading", False\)': '"hoplite_mp", False)',
    # Loops below threads are sequential there, because loky forks; here threads share the workers.
    r'"threading", "hoplite_mp", True': '"threading", "hoplite_mp", False',
    # What loky cannot do yet, ours can.
    r"^@pytest\.mark\.xfail\(reason=.*loky.*\n": "",
    r"backend\.title\(\)": '("Hoplite" if backend == "hoplite_mp" else backend.title())',
    # Marks of a plugin that is not used here.
    r"^(@|pytestmark = )pytest\.mark\.(thread_unsafe|no_cover).*\n": "",
}


class Reusable:
    """In place of what loky's function of that name gives: the workers of the last call."""

    def __init__(self, reuse: bool) -> None:
        assert reuse
        assert _joblib_pools._own is not None
        (last,) = [pool for pool in _joblib_pools._own.pools._pools if pool.last]
        self.executor = last.executor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reusable) and self.executor is other.executor

    __hash__ = None  # type: ignore[assignment]

    def shutdown(self) -> None:
        """loky does not notice a change of the environment; ours does."""


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
    vars(module)["Reusable"] = Reusable
    sys.modules[SUITE] = module  # functions of it are pickled by that name
    exec(compile(source, spec.origin, "exec"), vars(module))
    return module


MODULE = the_suite()


@pytest.fixture(autouse=True, scope="module")
def workers() -> Iterator[None]:
    """They are there before the first test, and end after the last one."""
    with joblib.parallel_config(backend=NAME, n_jobs=2):
        joblib.Parallel()(joblib.delayed(abs)(n) for n in range(4))
    yield
    ours.shutdown()


@pytest.fixture(autouse=True)
def ours_is_the_default(monkeypatch: pytest.MonkeyPatch, workers: None) -> Iterator[None]:
    monkeypatch.setattr(joblib.parallel, "DEFAULT_BACKEND", NAME)
    yield
    # The last workers are kept, and with them what their initializer was given.
    joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(n) for n in range(2))
    if multiprocessing.active_children():  # Managers, which cycles of joblib's objects hold
        gc.collect()


def of_ours(value: Any) -> bool:
    """And not of multiprocessing, whose pools leave a process of loky's behind."""
    values = value if isinstance(value, tuple) else (value,)
    if "multiprocessing" in values:
        return False
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
        elif mark.name == "parametrize" and mark.args[0] == "context":
            first, *others = mark.args[1]
            values = [first, *[pytest.param(one, marks=pytest.mark.soak) for one in others]]
            mark = pytest.mark.parametrize("context", values).mark
        marks.append(mark)
    if name in EXCEPTIONS:
        marks.append(pytest.mark.xfail(reason=EXCEPTIONS[name], strict=True).mark)
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
