"""Streams and async tasks on other hosts than their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, TLS_OR_PLAIN, UpCluster
from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTIONS = """
import asyncio, signal, tempfile
from concurrent.futures import CancelledError
def count(n, ended=None):
    try:
        for i in range(n):
            yield i, os.uname().nodename, os.getpid()
    finally:
        if ended:
            open(ended, "w").close()
async def count_async(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield i, os.uname().nodename
def arrays(n, size):
    for i in range(n):
        made = hoplite_mp.current().empty(size)
        made[:] = i
        yield made
def raises(n):
    yield from range(n)
    raise KeyError("its own")
def doubled(n, node):
    c = hoplite_mp.current()
    for ref in c.options(node=node).stream(count, n):
        yield c.get(ref)[0] * 2, os.uname().nodename
async def nap(i):
    await asyncio.sleep(0.02)
    return i, os.uname().nodename, os.getpid()
async def forever(path):
    try:
        open(path, "w").close()
        await asyncio.sleep(600)
    finally:
        open(path + "-ended", "w").close()
def exists(path):
    return os.path.exists(path)
def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
class Samples:
    def __init__(self):
        self.most = self.now = 0
    async def nap(self):
        self.now += 1
        self.most = max(self.most, self.now)
        while self.most < 4:  # until as many are here as may be
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        self.now -= 1
        return self.most
    async def forever(self, path):
        await forever(path)
    def give(self, n):
        for i in range(n):
            yield i, os.uname().nodename
second = next(n for n in c.nodes if n.host == "h2" and n.workers)
"""


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    # What is cancelled has time to end.
    made = UpCluster(lan, tls=request.param, HOPLITE_MP_CANCEL_GRACE_S=str(PATIENCE_S))
    yield made
    assert made.end() == [0, 0, 0]


@pytest.mark.parametrize("attaches", [True, False])
def test_streams_of_another_host(cluster: UpCluster, lan: Lan, attaches: bool) -> None:
    cluster.attaches = attaches
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + FUNCTIONS
        + """
view = c.options(node=there)
for size in (1, 3, None):
    got = [c.get(ref)[:2] for ref in view.options(buffersize=size).stream(count, 20)]
    assert got == [(i, "h3") for i in range(20)], got
print([c.get(ref) for ref in view.stream(count_async, 2)])
async def main():
    return [c.get(ref)[0] async for ref in view.stream(count, 5)]
print(asyncio.run(main()))
print([int(c.get(ref)[-1]) for ref in view.options(buffersize=2).stream(arrays, 6, 1 << 17)])
stream, found = view.stream(raises, 2), []
try:
    for ref in stream:
        found.append(c.get(ref))
except KeyError as error:
    print(found, error)
ended = tempfile.mkdtemp() + "/ended"
for how in ("close", "drop"):
    stream = view.options(buffersize=2).stream(count, 1 << 40, ended + how)
    c.get(next(stream))
    if how == "close":
        stream.close()
    del stream
    eventually(lambda: view.submit(exists, ended + how).result())
    view.submit(os.unlink, ended + how).result()
print(c.get(list(c.options(node=second).stream(doubled, 3, there))))
refs = list(view.stream(arrays, 4, 1 << 17))
print(float(c.get(c.reduce(refs))[5]))
""",
    )
    assert out.splitlines() == [
        "[(0, 'h3'), (1, 'h3')]",
        "[0, 1, 2, 3, 4]",
        "[0, 1, 2, 3, 4, 5]",
        "[0, 1] 'its own'",
        "[(0, 'h2'), (2, 'h2'), (4, 'h2')]",
        "6.0",
    ]


def test_async_tasks_and_actors_there(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + FUNCTIONS
        + """
view = c.options(node=there, concurrency=3)
got = [f.result(30) for f in [view.submit(nap, i) for i in range(12)]]
print([i for i, _, _ in got] == list(range(12)), {h for _, h, _ in got})
path = tempfile.mkdtemp() + "/forever"
running = view.submit(forever, path)
eventually(lambda: c.options(node=there, concurrency=3).submit(nap, 1).result() and exists(path))
print(running.cancel(force=True))
eventually(lambda: exists(path + "-ended"))
actor = c.options(node=there, concurrency=4).actor(Samples)
print(max(f.result(30) for f in [actor.nap() for _ in range(12)]))
call = actor.forever(path + "a")
eventually(lambda: exists(path + "a"))
print(call.cancel(force=True), call.cancelled())
eventually(lambda: exists(path + "a-ended"))
print([c.get(ref) for ref in actor.give(2)], hoplite_mp.Actor.restarts(actor))
def asks(actor):
    return [hoplite_mp.current().get(ref)[0] for ref in actor.give(3)]
print(c.options(node=second).submit(asks, actor).result(30))
""",
    )
    assert out.splitlines() == [
        "True {'h3'}",
        "True",
        "4",
        "True True",
        "[(0, 'h3'), (1, 'h3')] 0",
        "[0, 1, 2]",
    ]


def test_its_worker_there_is_killed(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + FUNCTIONS
        + """
stream = c.options(node=there, buffersize=3).stream(count, 12)
first, _, pid = c.get(next(stream))
c.options(node=there).submit(os.kill, pid, signal.SIGKILL).result(30)
rest = [c.get(ref) for ref in stream]
print([first, *[i for i, *_ in rest]] == list(range(12)), len({pid, *[p for *_, p in rest]}))
stream = c.options(node=there, buffersize=3, retries=0).stream(count, 12)
pid = c.get(next(stream))[2]
c.options(node=there).submit(os.kill, pid, signal.SIGKILL).result(30)
try:
    list(stream)
except hoplite_mp.WorkerLostError as error:
    print(type(error).__name__, "SIGKILL" in str(error), "count()" in str(error))
""",
    )
    assert out.splitlines() == ["True 2", "WorkerLostError True True"]


@pytest.mark.parametrize("retries", [3, pytest.param(0, marks=pytest.mark.soak)])
def test_its_host_dies(lan_permitted: None, retries: int) -> None:
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        driver = lan[1].popen(
            cluster.program(
                WAIT_FOR_ALL
                + FUNCTIONS
                + f"""
def bytes_there(n):
    for i in range(n):
        yield i, os.uname().nodename, np.full(1 << 16, float(i))
others = [n for n in c.nodes if n.workers and n.id != there.id]
path = tempfile.mkdtemp() + "/busy-"
def hold(path):
    open(path + os.uname().nodename, "w").close()
    while not exists(path):
        time.sleep(0.01)
busy = [c.options(node=n).submit(hold, path) for n in others]
eventually(lambda: all(exists(path + n.host) for n in others))
stream = c.options(buffersize=5, retries={retries}).stream(bytes_there, 30)
found = [c.get(next(stream)) for _ in range(3)]
print({{host for _, host, _ in found}}, flush=True)
sys.stdin.readline()
open(path, "w").close()
try:
    found += [c.get(ref) for ref in stream]
except hoplite_mp.HopliteError as error:
    print(type(error).__name__, len(found))
else:
    print([i for i, *_ in found] == list(range(30)), found[-1][1] != "h3")
    print([float(array[7]) for *_, array in found] == list(range(30)))
"""
            ),
            env=cluster.env,
            stdin=-1,
            stdout=-1,
            text=True,
        )
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "{'h3'}\n"
        lan[2].kill()
        driver.stdin.write("dead\n")
        driver.stdin.flush()
        expected = ["True True", "True"] if retries else ["ObjectLostError 3"]
        assert driver.stdout.read().splitlines() == expected
        driver.stdin.close()
        driver.stdout.close()
        assert driver.wait(PATIENCE_S) == 0
        del cluster.joined[1]
        assert cluster.end() == [0, 0]
