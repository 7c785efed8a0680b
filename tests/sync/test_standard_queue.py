"""The standard library's own tests of `queue.Queue`, with a Queue of a cluster in its place.

They are those of this very interpreter (`test.test_queue`), or of a package of the same version
beside it (Debian: libpython3.11-testsuite). What does not pass is listed below with its reason, and
a listed test that begins to pass fails here, so that the list stays true.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import unittest
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp

if TYPE_CHECKING:
    from types import ModuleType

    from hoplite_mp import Cluster

VERSION = "python{}.{}".format(*sys.version_info)
FOLDERS = [
    os.environ.get("HOPLITE_MP_STANDARD_TESTS", ""),
    f"/usr/lib/{VERSION}/test",
    f"/usr/lib64/{VERSION}/test",
    f"/usr/local/lib/{VERSION}/test",
]
ATTRIBUTE = "reads an attribute of the standard library's class: "
SINCE_313 = {"test_shutdown_allowed_transitions": ATTRIBUTE + "is_shutdown"}
# These are not run: failing, they leave threads behind that wait.
LEFT_OUT = {
    "test_shutdown_get_task_done_join": ATTRIBUTE + "unfinished_tasks",
    "test_shutdown_immediate_put_join": ATTRIBUTE + "unfinished_tasks",
    "test_shutdown_put_join": ATTRIBUTE + "unfinished_tasks",
}
EXCEPTIONS = {
    **(SINCE_313 if sys.version_info >= (3, 13) else {}),
    "test_negative_timeout_raises_exception": "ours does not wait then, as multiprocessing's Queue",
    "test_shrinking_queue": "changes maxsize; that of ours is the same for all processes",
}


def the_suite() -> ModuleType:
    try:
        return importlib.import_module("test.test_queue")
    except ImportError:
        pass
    for folder in FOLDERS:
        if os.path.exists(os.path.join(folder, "test_queue.py")):
            sys.path.append(folder)
            try:
                return importlib.import_module("test_queue")
            finally:
                sys.path.remove(folder)
    pytest.skip(
        f"this interpreter comes without test.test_queue, and none of its version is installed "
        f"(Debian: lib{VERSION}-testsuite); HOPLITE_MP_STANDARD_TESTS may name its folder",
        allow_module_level=True,
    )


TESTS: Any = the_suite().BaseQueueTestMixin
NAMES = sorted(name for name in dir(TESTS) if name.startswith("test_") and name not in LEFT_OUT)


def made(maxsize: int = 0) -> hoplite_mp.Queue[Any]:
    return hoplite_mp.Queue(maxsize=maxsize)


@pytest.mark.parametrize("name", NAMES)
def test_of_the_standard_queue(name: str, cluster: Cluster, request: pytest.FixtureRequest) -> None:
    if name in EXCEPTIONS:
        mark = pytest.mark.xfail(reason=EXCEPTIONS[name], strict=True)
        request.applymarker(mark)
    case: Any = type("QueueTest", (TESTS, unittest.TestCase), {"queue": queue})(name)
    case.type2test = made
    case.debug()


def test_every_listed_test_of_the_queue_is_there() -> None:
    assert set(EXCEPTIONS) <= set(NAMES)
