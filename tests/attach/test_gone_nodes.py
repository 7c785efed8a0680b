"""What was made for a node that is gone by now says so in every call: NodeLostError."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp._protocol.local import AddWorkers, BindPool, DrainNode
from tests.lan import forked
from tests.support.clusters import PATIENCE_S, ROOT

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.support.clusters import LoopbackCluster


def rank_of(rank: int) -> int:
    return rank


def join(up: LoopbackCluster) -> subprocess.Popen[bytes]:
    """A second node, with a worker, on the same host."""
    return forked.popen(
        [sys.executable, "-m", "hoplite_mp", "join", up.address, "--workers", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def until_nodes(c: Any, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(c.nodes) != count:
        assert time.monotonic() < deadline, c.nodes
        time.sleep(0.01)


def raises(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(hoplite_mp.NodeLostError, match="gone"):
        finish(call(*args, **kwargs))


def finish(found: Any) -> None:
    """Where a call has given a Future, the Future says it."""
    if isinstance(found, concurrent.futures.Future):
        found.result(PATIENCE_S)


def check_view(view: Any) -> None:
    raises(view.submit, abs, -1)
    raises(lambda: list(view.map(abs, range(4))))
    raises(view.executor, 1)
    raises(view.spmd, rank_of, 2)


def check_calls(c: Any, node: Any, ref: Any) -> None:
    raises(c.options, node=node)
    raises(c.executor, 1, node=node)
    raises(c.spmd, rank_of, 2, node=node)
    raises(c.add_workers, 1, node)
    raises(c.remove_node, node)
    for call in (c.reduce, c.allreduce, c.gather, c.allgather, c.reduce_scatter):
        raises(call, [ref], to=node)
    raises(c.broadcast, ref, to=node)
    raises(c.alltoall, [[ref]], to=node)


def test_views_and_places(up: LoopbackCluster) -> None:
    joined = join(up)
    try:
        with up.attach() as c:
            until_nodes(c, 2)
            far = c.nodes[1]
            fresh, used = c.options(node=far), c.options(node=far)
            several = c.options(node=[far])
            there = used.submit(np.ones, 50_000).ref  # its value stays there
            assert used.submit(abs, -1).result(PATIENCE_S) == 1
            ref = c.put(np.ones(1000))
            for process in [*psutil.Process(joined.pid).children(recursive=True), joined]:
                process.kill()
            until_nodes(c, 1)
            for view in (fresh, used, several):
                check_view(view)
            for node in (far, far.id, [far]):
                check_calls(c, node, ref)
            # What another thread has looked up just before.
            number = int(far.id[1:])
            for ask in (BindPool(number), AddWorkers(1, number), DrainNode(number)):
                raises(c._runtime.channel.call, ask)
            assert far.id not in c.locations(there)
            with pytest.raises(hoplite_mp.ObjectLostError, match="h1"):
                c.get(there, PATIENCE_S)
            assert c.locations(there) == []
            assert c.submit(abs, -1).result(PATIENCE_S) == 1
    finally:
        joined.kill()
        joined.wait()
