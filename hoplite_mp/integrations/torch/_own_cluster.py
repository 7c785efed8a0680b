"""A cluster for ranks on one host that were started without one, for example by torchrun.

Rank 0 opens the cluster on a port of the loopback interface, and the other ranks connect to it.
They find its address and its token file, but not the token, in torch's store.
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

import hoplite_mp._api.cluster
from hoplite_mp._common import clock
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["announce_cluster", "check_cluster", "open_cluster"]

ADDRESS_KEY = "hoplite_mp cluster"  # a key in torch's store, like the next two
CAME_KEY = "hoplite_mp ranks that came"
LEFT_KEY = "hoplite_mp ranks that left"
# How long rank 0 keeps the cluster open for ranks that have not exited. Longer: an exit takes
# longer if another rank was killed. Shorter: a slow rank loses the cluster before its last call.
LEAVE_S_MAX = 30.0
LEAVE_POLL_S = 0.01
TOKEN_BYTES = 32
# The data with which other ranks connect to the cluster that this process has opened, or joined.
_opened: dict[str, str] = {}
# Keeps that cluster alive. Otherwise it would shut down with the first process group.
_kept: list[hoplite_mp._api.cluster.Cluster] = []


def open_cluster(store: dist.Store, rank: int) -> hoplite_mp._api.cluster.Cluster:
    """Opens the cluster in rank 0, or connects to it in another rank. The cluster shuts down when
    rank 0's process exits; that process first waits for the other ranks. Raises ClosedError if the
    ranks are on several hosts, or if rank 0 has no cluster for them."""
    if rank == 0:
        return _lead(store)
    found = json.loads(store.get(ADDRESS_KEY))
    if "error" in found:
        raise ClosedError(f"this rank has no cluster for backend 'hoplite': {found['error']}")
    if found["host"] != _host():
        raise ClosedError(
            "backend 'hoplite' needs a cluster for ranks on several hosts: run `hoplite-mp up` on "
            "one host and `hoplite-mp join` on the others, and open Cluster(address=...) in each "
            "rank before init_process_group"
        )
    store.add(CAME_KEY, 1)
    try:
        cluster = hoplite_mp._api.cluster.Cluster(
            workers=0, address=found["address"], token=Path(found["token_file"])
        )
    except BaseException:
        store.add(LEFT_KEY, 1)
        raise
    _opened.update(found)
    _kept.append(cluster)
    atexit.register(_leave, store, os.getpid())  # runs before the cluster's own exit function
    return cluster


def announce_cluster(store: dist.Store, cluster: hoplite_mp._api.cluster.Cluster) -> None:
    """Announces rank 0's existing cluster to the other ranks. Ranks without a cluster can connect
    to it only if this module has opened it; otherwise they get an error with instructions."""
    if _is_own(cluster):  # opened for an earlier process group
        store.set(ADDRESS_KEY, json.dumps(_opened))
        atexit.register(_await_others, store, os.getpid())
        return
    error = "rank 0 has one; open Cluster(address=...) in every rank, or a cluster in none"
    store.set(ADDRESS_KEY, json.dumps({"error": error}))


def check_cluster(store: dist.Store, cluster: hoplite_mp._api.cluster.Cluster) -> None:
    """Checks the existing cluster of a rank other than rank 0. Raises ClosedError if rank 0 is in
    a different cluster."""
    found = json.loads(store.get(ADDRESS_KEY))
    if not _is_own(cluster):
        if found.get("address") not in (None, cluster.address):
            raise ClosedError(
                "this rank has a cluster, and rank 0 of the process group has opened another one "
                "because it had none: open Cluster(address=...) in every rank, or a cluster in none"
            )
        return
    if found.get("address") != _opened["address"] or found.get("host") != _opened["host"]:
        raise ClosedError(
            "this rank and rank 0 of the process group are in different clusters, which earlier "
            "process groups have opened for them: create the process group of all ranks with "
            "backend 'hoplite' first, or open Cluster(address=...) in every rank before"
        )


def _is_own(cluster: hoplite_mp._api.cluster.Cluster) -> bool:
    return bool(_opened) and _opened["address"] == cluster.address


def _lead(store: dist.Store) -> hoplite_mp._api.cluster.Cluster:
    folder = tempfile.mkdtemp(prefix="hoplite_mp-")  # mode 0700
    try:
        file = Path(folder, "token")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
            token.write(secrets.token_urlsafe(TOKEN_BYTES))
        cluster = hoplite_mp._api.cluster.Cluster(workers=0, listen="127.0.0.1:0", token=file)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        store.set(ADDRESS_KEY, json.dumps({"error": f"rank 0 could not open one: {error}"}))
        raise
    _opened.update(host=_host(), address=str(cluster.address), token_file=str(file))
    _kept.append(cluster)
    store.set(ADDRESS_KEY, json.dumps(_opened))
    atexit.register(_leave_last, store, folder, os.getpid())
    return cluster


def _host() -> str:
    """A value that is the same for all processes on one host, and differs between hosts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _leave(store: dist.Store, pid: int) -> None:
    if os.getpid() != pid:  # this is a forked child
        return
    try:
        store.add(LEFT_KEY, 1)
    except RuntimeError:  # torch's store is gone, so rank 0 is not waiting
        return


def _leave_last(store: dist.Store, folder: str, pid: int) -> None:
    if os.getpid() != pid:  # this is a forked child
        return
    try:
        _await_others(store, pid)
    finally:  # only now, because ranks that are still connecting need the token file
        shutil.rmtree(folder, ignore_errors=True)


def _await_others(store: dist.Store, pid: int) -> None:
    """Waits until the other ranks have exited, because the cluster shuts down with this
    process."""
    if os.getpid() != pid:  # this is a forked child
        return
    end = clock.monotonic() + LEAVE_S_MAX
    try:
        while store.add(LEFT_KEY, 0) < store.add(CAME_KEY, 0) and clock.monotonic() < end:
            clock.sleep(LEAVE_POLL_S)
    except RuntimeError:  # torch's store is gone
        return
