"""Large calls that members make again and again on real hosts, so that engines commit them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.lan import Lan
from tests.support.clusters import UpCluster

HEAD = """
import signal, sys, threading, time, traceback, numpy as np, hoplite_mp
rank = {rank}
with hoplite_mp.Cluster(address={address!r}, tls=False, memory={memory!r}) as c:
    with c.group("g", 2, rank, timeout=30) as g:
"""
# Of a store that has no room for a spare block: the block that came back with one call is the part
# of the next one, before the node has heard of the end of the first.
AGAIN = """
x = np.full(1 << 19, rank, np.float32)
outs = [np.empty_like(x) for _ in range(2)]
for call in range(40):
    x[0] = call
    g.allgather(x, out=outs)
    assert [(one[0], one[-1]) for one in outs] == [(call, 0), (call, 1)], call
    got = g.broadcast(x if rank == call % 2 else None, call % 2)
    assert (got[0], got[-1]) == (call, call % 2), call
    got[0] = -1
print("right", flush=True)
"""
# A member is interrupted in a large call that the other one does not make, and joins again.
MIXED = """
big = np.ones(1 << 17, np.float32)
for _ in range(4):
    g.allreduce(big)
g.barrier()
g.barrier()
def interrupt(*_):
    raise KeyboardInterrupt
def interrupt_later():
    main, names = threading.main_thread().ident, []
    while "allreduce" not in names:
        time.sleep(0.01)
        names = [one.name for one in traceback.extract_stack(sys._current_frames()[main])]
    time.sleep(0.2)
    signal.pthread_kill(main, signal.SIGALRM)
if rank == {who}:
    signal.signal(signal.SIGALRM, interrupt)
    threading.Thread(target=interrupt_later).start()
    try:
        g.allreduce(big)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        g.barrier()
    except hoplite_mp.ClosedError as error:
        print("ended by KeyboardInterrupt" in str(error), flush=True)
    g = c.group("g", 2, rank, timeout=30)
else:
    while {who} in g.alive:
        time.sleep(0.01)
    assert g.allreduce(big)[-1] == 1
    print(g.contributors == (rank,), flush=True)
g.barrier()
while g.contributors != (0, 1):
    g.barrier()
for _ in range(3):
    assert g.allreduce(big)[-1] == 2
lent = g.allreduce(big)
for _ in range(3):
    assert g.allreduce(lent)[-1] == 4
print("right", flush=True)
g.close()
"""


# Members are interrupted again and again in calls whose parts are objects of the store, or blocks,
# and join again.
INTERRUPTED = """
import gc
gc.disable()  # so that reference cycles count as what stays
x = np.full({items}, rank, np.float64)
armed = False
def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
def all_are_there(h):
    h.barrier()
    while h.contributors != (0, 1):
        h.barrier()
def joined():
    h = c.group("h", 2, rank, timeout=30)
    all_are_there(h)
    return h
h = joined()
ended = 0
for call in range({calls}):
    is_member = True
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.001 * (call % 3))
        got = h.allgather(x)
        armed = False
        assert [one[-1] for one in got if one is not None] == list(h.contributors)
    except KeyboardInterrupt:
        is_member = False
        ended += 1
    finally:
        armed = False
    if not all(g.allgather(is_member)):
        if is_member:
            all_are_there(h)
        else:
            h.close()  # in case the exception came before the call had begun
            h = joined()
signal.setitimer(signal.ITIMER_REAL, 0)
h.close()
print(ended > 3, flush=True)
got = None
g.barrier()
g.allgather(1)
until = time.monotonic() + 20
objects = 1
while objects and time.monotonic() < until:
    time.sleep(0.05)
    objects = c.stats()["objects"]
print(objects, flush=True)
g.barrier()
"""
# How much of the store is used at the end, by rank 0: besides the spans of the two processes and
# the block for the next call there may be nothing.
LEFT = """
if rank == 0:
    used = max(one["bytes_used"] for one in c.stats()["nodes"].values())
    print(used <= 3 * (1 << 20) + 8 * {items}, used, flush=True)
g.barrier()
"""


def played(program: str, memory: str = "256MiB") -> list[list[str]]:
    """What the members of each of two hosts print."""
    with Lan(2) as lan:
        cluster = UpCluster(lan, tls=False, workers=0)
        running = []
        for rank, host in enumerate(lan):
            about = {"rank": rank, "address": cluster.address, "memory": memory}
            source = HEAD.format(**about) + textwrap.indent(program, " " * 8)
            command = [sys.executable, "-c", source]
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(host.popen(command, env=cluster.env, text=True, **pipes))
        said = [process.communicate(timeout=100)[0].splitlines() for process in running]
        assert cluster.end()[0] == 0
    return [[line for line in lines if "tls=False" not in line] for lines in said]


def test_a_block_that_comes_back_is_given_again_at_once(lan_permitted: None) -> None:
    assert played(AGAIN, "24MiB") == [["right"]] * 2


def test_a_member_interrupted_in_a_large_call_leaves_and_joins_again(lan_permitted: None) -> None:
    for who in (0, 1):
        said = played(MIXED.format(who=who))
        assert sorted(said) == [["True", "right"], ["interrupted", "True", "right"]], said


@pytest.mark.parametrize(
    ("items", "calls"),
    [
        (3500, 60),
        pytest.param(8000, 120, marks=pytest.mark.soak),
        (125_000, 30),
        pytest.param(400_000, 40, marks=pytest.mark.soak),
    ],
)
def test_members_interrupted_in_many_calls_leave_nothing_behind(
    lan_permitted: None, items: int, calls: int
) -> None:
    said = played(INTERRUPTED.format(items=items, calls=calls) + LEFT.format(items=items))
    assert [lines[:2] for lines in said] == [["True", "0"]] * 2
    assert said[0][2].startswith("True"), said
