"""mpi4py's own tests of collectives and of messages of objects, through an adapter over a Group.

They are those of its source distribution, which is not part of this repository: its folder `test`
is named by HOPLITE_MP_MPI4PY_TESTS, or beside an mpi4py that is installed; without it this is
skipped, and `test_grid.py` is what runs always. What does not pass is listed with its reason, and a
listed test that begins to pass fails here, so that the list stays true.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import hoplite_mp

FOLDER = Path(os.environ.get("HOPLITE_MP_MPI4PY_TESTS", "/usr/share/mpi4py/test"))
MODULES = ("test_cco_buf", "test_cco_obj", "test_cco_vec", "test_cco_nb_buf", "test_p2p_obj")
# Of the arrays that they loop over: those that only look like a GPU's are the same memory.
BACKENDS = ("ArrayArray", "ArrayNumPy")
MEMBERS = 3
CALL_S = 60.0  # for one call of a member: when another one has failed, nobody waits for ever

DERIVED = "derived datatypes"
TOGETHER = "one list of several datatypes (Alltoallw)"
SYNCHRONOUS = "synchronous sends"
EXCEPTIONS = {
    "testBcastTypeIndexed": DERIVED,
    "testAlltoallw": TOGETHER,
    "testAlltoallw2": TOGETHER,
    "testAlltoallwBottom": TOGETHER,
    "testWaitSomeRecv": SYNCHRONOUS,
    "testTestSomeRecv": SYNCHRONOUS,
    "testCommLock": "reads what is private to mpi4py: its table of locks",
}
# These are not run: a rank that fails would leave another one waiting.
LEFT_OUT = {
    "testManyISSendAndRecv": SYNCHRONOUS,
    "testSSendAndRecv": SYNCHRONOUS,
    "testISSendAndRecv": SYNCHRONOUS,
    "testIRecvAndSSend": SYNCHRONOUS,
    "testIRecvAndISSend": SYNCHRONOUS,
    "testMixed": "receives as an object what was sent as the buffer of its pickle",
    "testProbe": SYNCHRONOUS + ", and Status",
    "testWaitSomeSend": SYNCHRONOUS,
    "testTestSomeSend": SYNCHRONOUS,
    "testCancel": "cancelling what was sent",
}

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="mpi4py's source distribution is not here"),
]


def run_module(rank: int, module: str, folder: str, name: str) -> dict[str, str]:
    """Of each test by its id what happened to it on this rank: "", "skipped", or the failure."""
    import unittest

    from tests.mpi.adapter import install

    sys.path.insert(0, folder)
    group = hoplite_mp.current().group(name, MEMBERS, rank, timeout=CALL_S)
    install(group)
    arrays: Any = importlib.import_module("arrayimpl")
    arrays.ArrayBackends[:] = [one for one in arrays.ArrayBackends if one.__name__ in BACKENDS]
    loaded = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module))
    tests = [test for case in loaded for test in case]  # type: ignore[union-attr]
    suite = unittest.TestSuite(t for t in tests if t.id().rsplit(".")[-1] not in LEFT_OUT)
    found: dict[str, str] = {}

    class Result(unittest.TestResult):
        def addSuccess(self, test: Any) -> None:
            found[test.id()] = ""

        def addFailure(self, test: Any, error: Any) -> None:
            found[test.id()] = self._exc_info_to_string(error, test)  # type: ignore[attr-defined]

        addError = addFailure

        def addSkip(self, test: Any, reason: str) -> None:
            found[test.id()] = "skipped"

    suite.run(Result())
    return found


def is_listed(test: str) -> bool:
    return test.rpartition(".")[2] in EXCEPTIONS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", MODULES)
def test_of_mpi4py(module: str) -> None:
    folder = str(FOLDER.resolve())
    with hoplite_mp.Cluster(workers=MEMBERS, memory="256MiB") as cluster:
        futures = cluster.spmd(run_module, MEMBERS, module, folder, f"mpi4py {module}")
        found = [future.result() for future in futures]
    texts = [item for one in found for item in one.items()]
    failed = {name: text for name, text in texts if text not in ("", "skipped")}
    unexpected = {name: text for name, text in failed.items() if not is_listed(name)}
    assert not unexpected, "\n".join(f"{name}: {text}" for name, text in unexpected.items())
    passed = {name for name in found[0] if all(one.get(name) == "" for one in found)}
    assert passed
    print(f"{module}: {len(passed)} passed, {len(failed)} listed")
    assert not {name for name in passed if is_listed(name)}, "listed, and it passes"
