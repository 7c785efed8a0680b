"""Event loops and values on other hosts: the loop goes on while they are fetched."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """
import asyncio
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
(far,) = [node for node in c.nodes if node.workers and node.id != c.here.id]
"""


@pytest.fixture
def cluster(lan_permitted: None) -> Iterator[UpCluster]:
    with Lan(2, rate="400mbit") as lan:
        made = UpCluster(lan, tls=False)
        yield made
        assert made.end() in ([0, 0], [0, -signal.SIGKILL])


def test_values_of_other_hosts(cluster: UpCluster) -> None:
    """Some 30 MB take most of a second over this link; nothing stands still meanwhile."""
    said = cluster.run(
        cluster.lan[0],
        HEAD
        + """
ticks = 0
async def tick():
    global ticks
    while True:
        await asyncio.sleep(0.005)
        ticks += 1
def here():
    return hoplite_mp.current().here.id
async def main():
    there = c.options(node=far)
    assert await there.submit(here) == far.id != c.here.id
    future, ref = there.submit(np.ones, 2_000_000), there.submit(np.zeros, 2_000_000).ref
    ticking = asyncio.ensure_future(tick())
    c.wait([future, ref])
    before = ticks
    begun = time.monotonic()
    found = await asyncio.gather(future, ref)
    seconds = time.monotonic() - begun
    assert [int(value.sum()) for value in found] == [2_000_000, 0]
    assert seconds > 0.3, seconds
    assert ticks - before > 10, (ticks - before, seconds)  # of 60, where nothing else runs
    refs = [there.submit(abs, -i).ref for i in range(20)]
    running = hoplite_mp.as_completed(refs[:10])
    running.add(refs[10:])
    assert sorted([await one async for one in running]) == list(range(20))
    assert [x async for x in there.map(abs, range(30))] == list(range(30))
    html = c._repr_html_()
    assert far.host in html and "2 workers" in html
asyncio.run(main())
print("done")
""",
    )
    assert said == "done\n"


def test_a_host_that_is_lost_ends_what_is_awaited(cluster: UpCluster) -> None:
    driver = cluster.lan[0].popen(
        cluster.program(HEAD + AWAITS), env=cluster.env, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver.stdout as said:
        assert said.readline() == "now\n"
        cluster.lan[1].kill()
        assert said.read().split() == ["lost", "lost", "NodeLostError", "ObjectLostError"]
    assert driver.wait(PATIENCE_S) == 0


AWAITS = """
def sleep():
    time.sleep(60)
async def main():
    there = c.options(node=far, retries=0)
    big = there.submit(np.ones, 2_000_000)
    c.wait([big])
    future = there.submit(sleep)
    waits = [asyncio.ensure_future(one) for one in (future, future.ref)]
    running = hoplite_mp.as_completed([future])
    await asyncio.sleep(0.1)
    print("now", flush=True)
    for one in waits:
        try:
            await one
        except hoplite_mp.NodeLostError:
            print("lost")
    async for one in running:
        print(type(one.exception()).__name__)
    try:
        await big
    except hoplite_mp.ObjectLostError:
        print("ObjectLostError")
asyncio.run(main())
"""
