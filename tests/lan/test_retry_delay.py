"""options(retry_delay=) over several hosts: the node of the submitter keeps the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster(lan_permitted: None) -> Iterator[UpCluster]:
    with Lan(3) as lan:
        made = UpCluster(lan, tls=False, options=("--resources", "gpu=1"))
        yield made
        made.kill()


# Hosts share the disk and the clock.
TASKS = """
import pathlib, signal, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
there = [n for n in c.nodes if n.host == "h3" and n.workers][0]
def fails(name, failures, how="raises"):
    path = folder / name
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as file:
        file.write(f"{time.monotonic()} {os.uname().nodename}\\n")
    if done < failures:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleeps":
            time.sleep(1000)
        raise OSError(f"try {done}")
    return done
def tries(name):
    path = folder / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), host) for at, host in map(str.split, lines)]
def pauses(name):
    times = [at for at, _ in tries(name)]
    return [after - before for before, after in zip(times, times[1:])]
def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
def retried():
    return c.stats()["tasks_retried"]
view = c.options(retry_exceptions=OSError, retry_delay=(0.2, 2, 0.3))
long = c.options(retry_exceptions=OSError, retry_delay=1000)
"""


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_task_on_another_host_is_tried_again_after_its_delay(cluster: UpCluster, how: str) -> None:
    cluster.run(
        cluster.lan[1],
        TASKS
        + f"""
bound = view.options(node=there)
assert bound.submit(fails, "a", 3, {how!r}).result(30) == 3
assert {{host for _, host in tries("a")}} == {{"h3"}}
assert len(tries("a")) == 4
assert all(pause >= least for pause, least in zip(pauses("a"), (0.2, 0.3, 0.3))), pauses("a")
assert retried() == 3
with_gpu = bound.options(resources={{"gpu": 1}})
assert with_gpu.submit(fails, "b", 2, {how!r}).result(30) == 2
assert all(pause >= least for pause, least in zip(pauses("b"), (0.2, 0.3))), pauses("b")
with c.executor(1, node=there, retry_exceptions=OSError, retry_delay=0.2) as pool:
    assert pool.submit(fails, "c", 1, {how!r}).result(30) == 1
assert pauses("c")[0] >= 0.2
try:
    bound.options(retries=1).submit(fails, "d", 9, {how!r}).result(30)
    raise AssertionError
except (OSError, hoplite_mp.WorkerLostError) as error:
    print(type(error).__name__, len(tries("d")))
assert sorted(view.map(fails, "efghij", [1] * 6, [{how!r}] * 6)) == [1] * 6
""",
    )


def test_worker_and_resources_of_another_host_are_free_during_the_delay(
    cluster: UpCluster,
) -> None:
    cluster.run(
        cluster.lan[1],
        TASKS
        + """
from hoplite_mp._cli.dump import collect
bound = long.options(node=there, resources={"gpu": 1})
future = bound.submit(fails, "a", 1)
eventually(lambda: retried() == 1)
assert bound.submit(abs, -3).result(30) == 3
assert c.options(node=there).submit(abs, -4).result(30) == 4
counts = {one["node"]: one["queued"]["count"] for one in collect(c)["nodes"]}
here = hoplite_mp._api.nodes.node_numbers(c._runtime, c.here)[0]
assert counts == {node: int(node == here) for node in counts}, counts
assert not future.done()
assert future.cancel()
c.remove_node(there)  # a task in its delay keeps no host from leaving
""",
    )


@pytest.mark.parametrize("when", ["runs", "waits"])
def test_death_of_the_host_that_ran_a_task(cluster: UpCluster, when: str) -> None:
    """While the task runs, its delay begins; while it waits for its next try, nothing changes."""
    program = (
        TASKS
        + f"""
how = "sleeps" if {when!r} == "runs" else "raises"
futures = [view.submit(fails, name, 1, how) for name in "abc"]
eventually(lambda: all(map(tries, "abc")))
print(*[name for name in "abc" if tries(name)[0][1] == "h3"], flush=True)
"""
    )
    lan = cluster.lan
    if when == "runs":
        program += """
sys.stdin.readline()
died = [(name, future) for name, future in zip("abc", futures) if tries(name)[0][1] == "h3"]
(name, future), = died
for other in futures:
    if other is not future:
        other.cancel(force=True)
assert future.result(60) == 1
assert tries(name)[1][1] != "h3"
assert pauses(name)[0] >= 0.2
"""
    else:
        program = (
            program.replace("(0.2, 2, 0.3)", "2.0")
            + """
sys.stdin.readline()
# On a busy machine the host may die a moment later, during the second try.
assert all(future.result(60) in (1, 2) for future in futures)
assert all(pauses(name)[0] >= 2.0 for name in "abc")
"""
        )
    with Driver(cluster, lan[1], program) as driver:
        driver.hear()
        lan[2].kill()
        driver.say()


def test_end_of_the_driver_ends_the_delay(cluster: UpCluster) -> None:
    program = (
        TASKS
        + """
future = long.options(node=there).submit(fails, "a", 1)
eventually(lambda: retried() == 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    cluster.run(cluster.lan[1], program, check=False)
    cluster.run(
        cluster.lan[1],
        TASKS
        + """
from hoplite_mp._cli.dump import collect
eventually(lambda: not any(
    one["queued"]["count"] + one["waiting"]["count"] for one in collect(c)["nodes"]))
""",
    )
