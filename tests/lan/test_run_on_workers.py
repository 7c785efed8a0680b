"""Cluster.run, options(env=) and options(retry_exceptions=) over several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster


def test_run_on_all_hosts(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import tempfile
folder = tempfile.mkdtemp()  # hosts share the disk
def note(value=None):
    name = f"{folder}/{os.uname().nodename}-{os.getpid()}"
    open(name, "a").write("x")
    return os.uname().nodename
found = c.run(note)
workers = {n.id: n.workers for n in c.nodes if n.workers}
assert {name.partition("@")[2] for name in found} == set(workers)
assert len(found) == sum(workers.values()), (found, workers)
assert [open(f"{folder}/{one}").read() for one in os.listdir(folder)] == ["x"] * len(found)
assert set(c.run(note, node=there).values()) == {"h3"}
assert set(c.options(node=there).run(note).values()) == {"h3"}
# Arrays travel, and those of a result come back.
back = c.run(lambda a: a + 1, np.zeros(1 << 17), node=there)
assert all(float(one.sum()) == 1 << 17 for one in back.values())
# A worker there is busy until the timeout; what it has not begun does not run later.
go = f"{folder}/go"
def wait():
    open(f"{folder}/busy{os.getpid()}", "w").close()
    while not os.path.exists(go):
        time.sleep(0.01)
def notes():  # of the workers that are busy: others may have begun, and end later
    pids = [one.removeprefix("busy") for one in os.listdir(folder) if one.startswith("busy")]
    paths = [f"{folder}/h3-{pid}" for pid in pids]
    return sum(os.path.getsize(path) for path in paths if os.path.exists(path))
busy = [c.options(node=there).submit(wait) for _ in range(there.workers)]
while sum(one.startswith("busy") for one in os.listdir(folder)) < there.workers:
    time.sleep(0.01)
before = notes()
try:
    c.run(note, node=there, timeout=0.3)
except hoplite_mp.HopliteTimeoutError as error:
    print("not yet")
open(go, "w").close()
c.wait(busy)
c.run(abs, -1, node=there)
assert notes() == before, (before, notes())
# One that dies there is left out.
def end():
    os._exit(3)
assert c.run(end, node=there) == {}
def inside():
    return hoplite_mp.current().run(os.getpid)
both = [c.submit(inside), c.options(node=there).submit(inside)]
print(all(len(one.result(60)) >= 3 for one in both))
""",
    )
    assert out.splitlines() == ["not yet", "True"]


def test_environment_and_exceptions_there(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import tempfile
folder = tempfile.mkdtemp()
def look():
    executed_with = open("/proc/self/environ").read().count("A_TEST=")
    return os.environ.get("A_TEST"), os.uname().nodename, executed_with
view = c.options(env={"A_TEST": "x"}, node=there)
with view.executor(1) as e:
    print(*e.submit(look).result(60))
class Actor:
    def look(self):
        return look()
print(*view.actor(Actor).look().result(60))
print(*[one.result(60)[:2] for one in view.spmd(lambda rank: look(), 1)][0])
def flaky(name, failures):
    with open(f"{folder}/{name}", "a") as file:
        file.write("x")
    done = os.path.getsize(f"{folder}/{name}") - 1
    if done < failures:
        raise OSError(done)
    return done, os.uname().nodename
again = c.options(retry_exceptions=(OSError,), node=there)
print(*again.submit(flaky, "a", 3).result(60))
names, failures = [f"b{i}" for i in range(8)], [i % 3 for i in range(8)]
print([one for one, _ in again.map(flaky, names, failures, chunksize=4)])
try:
    again.submit(flaky, "c", 9).result(60)
except OSError as error:
    print(error.args, "@h" in str(error.__cause__))
print(c.stats()["tasks_retried"])
""",
    )
    assert out.splitlines() == [
        "x h3 1",
        "x h3 1",
        "x h3",
        "3 h3",
        "[0, 1, 2, 0, 1, 2, 0, 1]",
        "(3,) True",
        "13",
    ]


def test_a_host_that_leaves_during_a_run(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import tempfile, threading
folder = tempfile.mkdtemp()
def wait():
    open(f"{folder}/busy{os.getpid()}", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
busy = [c.options(node=there).submit(wait) for _ in range(there.workers)]
while len(os.listdir(folder)) < there.workers:
    time.sleep(0.01)
found = []
runs = threading.Thread(target=lambda: found.append(c.run(os.getpid)))
runs.start()
leaves = threading.Thread(target=lambda: c.remove_node(there))
leaves.start()
time.sleep(0.2)  # either may come first
open(f"{folder}/go", "w").close()
runs.join(60)
leaves.join(60)
assert found and not leaves.is_alive()
others = [one for one in found[0] if not one.endswith("@" + there.id)]
# Of the tests before there may still be a worker more, which stood in for one that waited.
assert len(others) >= sum(one.workers for one in c.nodes), (found, c.nodes)
print({one.partition("@")[2] for one in others} == {one.id for one in c.nodes if one.workers})
""",
    )
    assert out.splitlines() == ["True"]
