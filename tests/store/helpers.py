"""What the tests of the store share: polling with an end, counts, and looks at real memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster, ObjectRef

PATIENCE_S = 20.0
MIB = 1 << 20
BLOCK = 512  # the unit of st_blocks


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Polls until the condition holds; fails the test when it does not in time."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {PATIENCE_S} s"
        time.sleep(0.002)
    return found


def settles(look: Callable[[], Any], wanted: Any) -> None:
    """Polls until `look` returns what is wanted; shows what it returns instead if it never does."""
    end = time.monotonic() + PATIENCE_S
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.002)
    assert found == wanted, f"still {found!r} after {PATIENCE_S} s, not {wanted!r}"


def falls_to(look: Callable[[], int], most: int) -> None:
    """Polls until `look` returns at most so much."""
    end = time.monotonic() + PATIENCE_S
    while (found := look()) > most and time.monotonic() < end:
        time.sleep(0.002)
    assert found <= most, f"still {found} after {PATIENCE_S} s, more than {most}"


def mib(number: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """So many MiB of bytes that tell from which seed they are."""
    return np.random.default_rng(seed).integers(0, 256, int(number * MIB), np.uint8)


def echo(value: Any) -> Any:
    return value


def checksum(array: Any) -> int:
    return int(np.asarray(array).sum(dtype=np.int64))


def pid(*_: Any) -> int:
    return os.getpid()


def warm(cluster: Cluster, *functions: Any) -> None:
    """Sends the functions once, so that the objects that carry them count in no later reading."""
    for function in functions:
        cluster.wait(cluster.submit(function, 0))


def objects(cluster: Cluster) -> int:
    return int(cluster.stats()["objects"])


def computed(cluster: Cluster) -> float:
    """Processor seconds of this process and the node: other programs add nothing to them."""
    cluster.stats()  # it has begun
    node = psutil.Process(cluster._runtime.tasks.pid(0)).cpu_times()
    return time.process_time() + float(node.user + node.system)


def client(cluster: Cluster) -> Any:
    return cluster._runtime.client


def local_id(cluster: Cluster, ref: ObjectRef[Any]) -> int:
    return cluster._runtime.memory.local_id(ref)


def header(cluster: Cluster, ref: ObjectRef[Any]) -> dict[str, Any]:
    """Every field of the object's header, as any process sees it."""
    return dict(client(cluster).inspect(local_id(cluster, ref)))


def held(cluster: Cluster, ref: ObjectRef[Any]) -> tuple[int, int]:
    """How often this process holds and pins the object."""
    found: tuple[int, int] = client(cluster).private_counts(local_id(cluster, ref))
    return found


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class StoreFile:
    """The store's memory, kept open beside the cluster; what it really occupies."""

    def __init__(self, cluster: Cluster) -> None:
        host = cluster._host
        assert host is not None
        cluster.stats()  # its processes are up
        for link in Path(f"/proc/{host.process.pid}/fd").iterdir():
            if "hoplite_mp store" in os.readlink(link):
                self.fd = os.open(link, os.O_RDONLY)
                return
        raise AssertionError("the supervisor has no store")

    def allocated(self) -> int:
        return os.fstat(self.fd).st_blocks * BLOCK

    def close(self) -> None:
        os.close(self.fd)


def gone_or_closed(cluster: Cluster) -> None:
    """What every method of a cluster that is not this process's does."""
    for call in (lambda: cluster.put(1), lambda: cluster.submit(echo, 1), cluster.stats):
        try:
            call()
        except hoplite_mp.ClosedError:
            continue
        raise AssertionError("no ClosedError")
