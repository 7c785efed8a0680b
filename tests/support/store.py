"""The state of a store as its clients and the operating system see it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import hoplite_mp
from hoplite_mp import Config
from tests.support.functions import echo
from tests.support.values import MIB, mib

if TYPE_CHECKING:
    from hoplite_mp import Cluster, ObjectRef


BLOCK = 512  # the unit of st_blocks


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


LIMIT = 32 * MIB


def open_spilling(tmp_path: Path, put_wait_s: float = 10, **fields: Any) -> Cluster:
    config = Config(populate_ahead_bytes=0, put_wait_s=put_wait_s, **fields)
    return hoplite_mp.Cluster(1, memory=LIMIT, spill_dir=tmp_path, config=config)


def spilled_array(seed: int) -> Any:
    return mib(4, seed)
