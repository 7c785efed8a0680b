"""A cluster for the ranks of one host that were started without one, by torchrun for example.

Rank 0 opens it, at a port of the loopback interface; the other ranks connect to it. They find its
address, and the file with its token, in torch's store; the token itself does not go that way.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hoplite_mp.cluster
from hoplite_mp import clock
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["open_cluster"]

ADDRESS_KEY = "hoplite_mp cluster"  # under these keys in torch's store
LEFT_KEY = "hoplite_mp ranks that left"
# How long rank 0 keeps the cluster open for ranks that have not ended yet. Longer: an exit takes
# longer when another rank was killed. Shorter: a slow rank loses the cluster before its last call.
LEAVE_S_MAX = 30.0
LEAVE_POLL_S = 0.01
TOKEN_BYTES = 32


def open_cluster(store: dist.Store, rank: int, size: int) -> hoplite_mp.cluster.Cluster:
    """Opens the cluster of these ranks in this process. It ends with the process of rank 0, which
    waits for the others. ClosedError: the ranks are on several hosts."""
    if rank == 0:
        return _lead(store, size)
    found = json.loads(store.get(ADDRESS_KEY))
    if found["host"] != _host():
        raise ClosedError(
            "backend 'hoplite' needs a cluster for ranks on several hosts: run `hoplite-mp up` on "
            "one host and `hoplite-mp join` on the others, and open Cluster(address=...) in each "
            "rank before init_process_group"
        )
    cluster = hoplite_mp.cluster.Cluster(
        workers=0, address=found["address"], token=Path(found["token_file"])
    )
    atexit.register(_leave, store)  # runs before the cluster's own exit function
    return cluster


def _lead(store: dist.Store, size: int) -> hoplite_mp.cluster.Cluster:
    folder = tempfile.mkdtemp(prefix="hoplite_mp-")  # mode 0700
    try:
        file = Path(folder, "token")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
            token.write(secrets.token_urlsafe(TOKEN_BYTES))
        cluster = hoplite_mp.cluster.Cluster(workers=0, listen="127.0.0.1:0", token=file)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    found = {"host": _host(), "address": cluster.address, "token_file": str(file)}
    store.set(ADDRESS_KEY, json.dumps(found))
    atexit.register(_leave_last, store, size, folder)
    return cluster


def _host() -> str:
    """What the processes of one host have in common, and no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _leave(store: dist.Store) -> None:
    try:
        store.add(LEFT_KEY, 1)
    except RuntimeError:  # torch's store has ended, so rank 0 does not wait
        return


def _leave_last(store: dist.Store, size: int, folder: str) -> None:
    """Waits until the other ranks have ended, because the cluster ends with this process."""
    shutil.rmtree(folder, ignore_errors=True)
    end = clock.monotonic() + LEAVE_S_MAX
    try:
        while store.add(LEFT_KEY, 0) < size - 1 and clock.monotonic() < end:
            clock.sleep(LEAVE_POLL_S)
    except RuntimeError:  # torch's store has ended
        return
