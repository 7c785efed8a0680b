"""`trace` and `hoplite-mp dump` over several hosts, on a cluster that a user would start."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.lan import Lan
from tests.support.clusters import HOPLITE, PATIENCE_S, TLS_OR_PLAIN, UpCluster
from tests.support.timeline import Timeline
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lan import Host


def await_hosts(cluster: UpCluster, host: Host) -> None:
    """Until all three have joined."""
    cluster.run(
        host,
        """
        deadline = time.monotonic() + 40
        while len([n for n in c.nodes if n.workers]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        """,
    )


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    made = UpCluster(lan, tls=request.param, attaches=False)
    await_hosts(made, lan[0])
    yield made
    assert made.end() == [0, 0, 0]


def dump(cluster: UpCluster, host: Host, *options: str) -> subprocess.CompletedProcess[str]:
    tls = [] if cluster.tls else ["--no-tls"]
    return host.run(
        [*HOPLITE, "dump", cluster.address, *tls, *options],
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )


def values(cluster: UpCluster, host: Host) -> dict[str, Any]:
    done = dump(cluster, host, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_task_once_whichever_host_ran_it(
    cluster: UpCluster, lan: Lan, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    out = cluster.run(
        lan[1],
        f"""
        import json
        from hoplite_mp._cli import dump
        def work(i):
            time.sleep(0.005)
            return os.getpid()
        assert len([n for n in c.nodes if n.workers]) == 3
        with c.trace({str(path)!r}):
            futures = [c.submit(work, i) for i in range(150)]
            c.wait(futures)
            # A result is there a moment before its worker has left the task.
            while any(node["running"]["first"] for node in dump.collect(c)["nodes"]):
                time.sleep(0.005)
        print(json.dumps({{f.ref.id: f.result() for f in futures}}))
        """,
    )
    ran = json.loads(out)
    found = Timeline(path)
    tasks = {task["args"]["id"]: task for task in found.of("task")}
    assert found.outcomes() == {oid: ["done"] for oid in ran}
    # The processes of three hosts, by their numbers there: each task is on the track of its own.
    assert {oid: task["args"]["pid"] for oid, task in tasks.items()} == ran
    assert {task["name"] for task in tasks.values()} == {"work"}
    assert len({task["pid"] for task in tasks.values()}) == 3
    clocks = found.other["nodes"]
    assert sum(bool(clock["error_us"]) for clock in clocks.values()) == 3  # all but the driver's
    for clock in clocks.values():  # emulated hosts have one clock
        for ahead, error in zip(clock["ahead_us"], clock["error_us"], strict=True):
            assert abs(ahead) <= error + 0.001
    assert found.other["lost"] == []


def test_transfers_are_those_that_there_were(cluster: UpCluster, lan: Lan, tmp_path: Path) -> None:
    """Every byte of an object that was fetched and of one that was broadcast, to each node once."""
    path = tmp_path / "run.json"
    out = cluster.run(
        lan[0],
        f"""
        import json
        def total(x):
            return float(x.sum())
        far = [n for n in c.nodes if n.workers]
        with c.trace({str(path)!r}):
            one = c.put(np.ones(500_000))
            at = [c.options(node=n).submit(total, one) for n in far[1:]]
            assert [f.result() for f in at] == [500_000.0] * 2
            two = c.put(np.ones(300_000))
            c.broadcast(two).result()
        print(json.dumps([one.id, two.id, [n.id for n in far],
                          "h%d" % c._runtime.tasks.node_number]))
        """,
    )
    one, two, far, own = json.loads(out)
    moved: dict[tuple[str, str], int] = {}
    for event in Timeline(path).of("transfer"):
        about = event["args"]
        if about["outcome"] != "whole":
            continue  # a later plan brought it from somebody else
        assert about["from"] != about["to"]
        assert about["to"] == f"h{event['pid'] - 1}"
        key = about["object"], about["to"]
        moved[key] = moved.get(key, 0) + about["bytes"]
    head = 1024  # of the payload, at most
    assert moved.keys() == {(one, far[1]), (one, far[2]), *((two, node) for node in far)}
    assert own not in {to for _, to in moved}
    for (oid, _), nbytes in moved.items():
        assert 0 <= nbytes - 8 * (500_000 if oid == one else 300_000) < head


def test_collectives_and_groups_over_hosts(cluster: UpCluster, lan: Lan, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    out = cluster.run(
        lan[1],
        f"""
        import json
        def part(i):
            return np.full(200_000, float(i))
        def member(rank):
            g = hoplite_mp.current().group("over hosts", 3, rank)
            return [float(g.allreduce(np.full(n, 1.0))[0]) for n in (10, 100_000)]
        far = [n for n in c.nodes if n.workers]
        with c.trace({str(path)!r}):
            parts = [c.options(node=n).submit(part, i) for i, n in enumerate(far)]
            c.wait(parts)
            total = c.reduce(parts)
            assert c.get(total)[0] == 3.0
            members = [c.options(node=n).submit(member, i) for i, n in enumerate(far)]
            assert [f.result() for f in members] == [[3.0, 3.0]] * 3
        print(json.dumps(c._runtime.tasks.node_number))
        """,
    )
    own = json.loads(out)
    found = Timeline(path)
    (reduction,) = [event for event in found.of("collective") if event["name"] == "reduce"]
    assert reduction["pid"] == own + 1
    assert reduction["args"]["members"] == [0, 1, 2]
    assert reduction["args"]["outcome"] == "committed"
    parts = [
        event
        for event in found.of("collective")
        if event["name"] == "part of reduce"
        and event["args"]["operation"] == reduction["args"]["operation"]
    ]
    assert len({event["pid"] for event in parts}) == len(parts) >= 3
    begin, end = reduction["ts"], reduction["ts"] + reduction["dur"]
    error_us = max(sum(clock["error_us"]) for clock in found.other["nodes"].values())
    for event in parts:  # the requester heard of the plan about when they did
        assert event["ts"] < end + error_us
        assert event["ts"] + event["dur"] > begin - error_us
    calls = found.of("group call")
    assert sorted((c["args"]["call"], c["args"]["rank"]) for c in calls) == [
        (call, rank) for call in range(2) for rank in range(3)
    ]
    assert {call["name"] for call in calls} == {"allreduce over hosts"}


@pytest.mark.soak
def test_two_programs_cannot_trace_at_once(cluster: UpCluster, lan: Lan, tmp_path: Path) -> None:
    first = lan[0].popen(
        cluster.program(
            f"""
            with c.trace({str(tmp_path / "one.json")!r}):
                print("traces", flush=True)
                sys.stdin.readline()
            print("over", flush=True)
            sys.stdin.readline()
            """
        ),
        env=cluster.driver_env(lan[0]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    program = f"""
        try:
            with c.trace({str(tmp_path / "two.json")!r}):
                print("begun")
        except RuntimeError as error:
            print(error)
        """
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "traces\n"
    assert "this cluster is already being traced" in cluster.run(lan[1], program)
    print(file=first.stdin, flush=True)
    assert first.stdout.readline() == "over\n"
    assert cluster.run(lan[1], program) == "begun\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]
    first.communicate("\n", timeout=PATIENCE_S)
    assert first.returncode == 0


def test_a_trace_ends_with_its_program(cluster: UpCluster, lan: Lan, tmp_path: Path) -> None:
    """Killed with its whole node, it cannot say so; the others learn it with its end."""
    first = lan[0].popen(
        cluster.program(
            f"""
            with c.trace({str(tmp_path / "one.json")!r}):
                print("traces", flush=True)
                sys.stdin.readline()
            """
        ),
        env=cluster.driver_env(lan[0]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "traces\n"
    lan[0].signal(first, signal.SIGKILL)
    first.communicate(timeout=PATIENCE_S)
    out = cluster.run(
        lan[1],
        f"""
        deadline = time.monotonic() + 40
        while True:
            try:
                with c.trace({str(tmp_path / "two.json")!r}):
                    c.submit(os.getpid).result()
                break
            except RuntimeError:
                assert time.monotonic() < deadline
        """,
    )
    assert out == ""
    assert len(Timeline(tmp_path / "two.json").of("task")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["two.json"]


def test_a_node_that_joins_is_traced_too(cluster: UpCluster, lan: Lan, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    program = lan[0].popen(
        cluster.program(
            f"""
            from hoplite_mp._cli import dump
            def known():
                return {{n.id for n in c.nodes if n.workers}}
            before = known()
            deadline = time.monotonic() + 40
            with c.trace({str(path)!r}):
                print("traces", flush=True)
                while len(known()) == len(before):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                (new,) = known() - before
                ids = [c.options(node=new).submit(os.getpid) for _ in range(5)]
                c.wait(ids)
                # A result is there a moment before its worker has left the task.
                while any(node["running"]["first"] for node in dump.collect(c)["nodes"]):
                    time.sleep(0.005)
            print(new, *[f.ref.id for f in ids], flush=True)
            """
        ),
        env=cluster.driver_env(lan[0]),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "traces\n"
    more = cluster.join(lan[1], 1)
    out, _ = program.communicate(timeout=PATIENCE_S)
    new, *ids = out.split()
    found = Timeline(path)
    assert found.outcomes() == {oid: ["done"] for oid in ids}
    assert {f"h{task['pid'] - 1}" for task in found.of("task")} == {new}
    assert len(found.other["nodes"][new]["error_us"]) == 2
    lan[1].signal(more, signal.SIGTERM)
    assert more.wait(PATIENCE_S) == 0


def test_dump_of_tasks_and_a_group_over_hosts(cluster: UpCluster, lan: Lan, tmp_path: Path) -> None:
    """A program that hangs in all ways; then everybody goes on."""
    go = tmp_path / "go"
    program = lan[1].popen(
        cluster.program(
            f"""
            from pathlib import Path
            def hang(*needs):
                while not Path({str(go)!r}).exists():
                    time.sleep(0.01)
                return 1.0
            def member(rank, size):
                g = hoplite_mp.current().group("short", size, rank)
                return float(g.allreduce(np.ones(1))[0])
            far = [n for n in c.nodes if n.workers]
            first = [c.options(node=n).submit(hang) for n in far]
            after = c.submit(hang, first[0])
            total = c.reduce(first)
            here = c.group("short", 3, 1)
            late = here.allreduce_async(np.ones(1))
            print(first[0].ref.id, first[2].ref.id, after.ref.id, flush=True)
            print(sys.stdin.readline().strip(), flush=True)
            others = [c.submit(member, rank, 3) for rank in (0, 2)]
            assert late.result()[0] == 3.0 and c.get(total) == 3.0
            print([f.result() for f in [*first, after, *others]])
            """
        ),
        env=cluster.driver_env(lan[1]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    ids = program.stdout.readline().split()
    found: dict[str, Any] = {}

    def ready() -> bool:
        found.update(values(cluster, lan[2]))
        nodes = found["nodes"]
        running = [one["id"] for node in nodes for one in node["running"]["first"]]
        return len(running) == 3 and any(node["groups"]["first"] for node in nodes)

    eventually(ready, within=PATIENCE_S)
    nodes = found["nodes"]
    assert found["silent"] == []
    assert len(nodes) == 4  # three hosts and the driver's node, not that of the dump
    ran = {one["id"]: node["node"] for node in nodes for one in node["running"]["first"]}
    assert len(set(ran.values())) == 3
    assert set(ids[:2]) <= ran.keys()
    (driver,) = [node for node in nodes if node["waiting"]["first"]]
    (waiting,) = driver["waiting"]["first"]
    assert waiting["id"] == ids[2]
    (need,) = waiting["needs"]
    assert need == {
        "id": ids[0],
        "where": f"the result of hang(), which was sent to h{ran[ids[0]]}",
    }
    assert {one["id"] for one in driver["sent"]["first"]} == ran.keys()
    (operation,) = driver["collectives"]["first"]
    assert (operation["sources"], operation["missing"], operation["num"]) == (3, 3, 3)
    (group,) = driver["groups"]["first"]
    assert (group["name"], group["formed"]) == ("short", False)
    assert [member["rank"] for member in group["joined"]] == [1]
    text = dump(cluster, lan[2], "--stacks").stdout
    assert f"h{driver['node']} (h2)\n" in text
    assert "waiting for ranks 0, 2" in text
    assert text.count("in hang\n") == 3
    go.touch()
    out, _ = program.communicate("go on\n", timeout=PATIENCE_S)
    assert out == "go on\n[1.0, 1.0, 1.0, 1.0, 3.0, 3.0]\n"


@pytest.mark.soak
def test_a_node_that_hangs_and_then_is_gone(lan_permitted: None, tmp_path: Path) -> None:
    """All processes of a host are stopped while another one pulls an array from it."""
    path = tmp_path / "run.json"
    with Lan(3, rate="40mbit") as lan:
        cluster = UpCluster(lan, tls=False, attaches=False)
        await_hosts(cluster, lan[0])
        program = lan[0].popen(
            cluster.program(
                f"""
                def make():
                    return np.ones(8_000_000)
                far = [n for n in c.nodes if n.host == "h3"]
                made = c.options(node=far).submit(make)
                c.wait(made)
                try:
                    with c.trace({str(path)!r}):
                        print(made.ref.id, far[0].id, flush=True)
                        c.get(made)
                except hoplite_mp.ObjectLostError:
                    print("lost")
                """
            ),
            env=cluster.driver_env(lan[0]),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        oid, holder = program.stdout.readline().split()
        moving: list[dict[str, Any]] = []

        def begun() -> bool:
            moving[:] = [
                one
                for node in values(cluster, lan[1])["nodes"]
                for one in node["transfers"]["first"]
                if one["object"] == oid and one["received"]
            ]
            return bool(moving)

        eventually(begun, within=PATIENCE_S)
        assert {one["from"] for one in moving} == {holder}
        assert 0 <= sum(one["bytes"] for one in moving) - 64_000_000 < 1024
        assert sum(one["received"] for one in moving) < 64_000_000
        entered = psutil.Process(cluster.joined[1].pid)
        outer = entered.children()  # with that one nsenter itself would stop, and reap nobody
        for process in entered.children(recursive=True):
            if process not in outer:
                process.suspend()
        done = dump(cluster, lan[1])
        assert done.returncode == 0
        assert f"{holder} does not answer" in done.stdout.split("\n")
        assert f"  object {oid} is in transit from {holder} for " in done.stdout
        lan[2].kill()
        out, _ = program.communicate(timeout=PATIENCE_S)
        assert out == "lost\n"
        found = Timeline(path)
        assert found.other["lost"] == [holder]
        assert holder not in found.other["left"]
        assert f"node {holder} was lost: its events are missing" in found.said
        assert {event["args"]["outcome"] for event in found.of("transfer")} == {"given up"}
        assert cluster.end()[:2] == [0, 0]


def test_dump_of_a_cluster_that_is_not_there(lan: Lan, cluster: UpCluster) -> None:
    done = lan[1].run(
        [*HOPLITE, "dump", f"{lan[1].address}:7099"],
        env=cluster.env | {"HOPLITE_MP_CONNECT_TIMEOUT_S": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hoplite-mp: ")
    assert done.stderr.count("\n") == 1


def test_a_command_that_waits_for_a_cluster_prints_the_wait_as_its_own_line(
    lan: Lan, cluster: UpCluster
) -> None:
    status = lan[1].popen(
        [*HOPLITE, "status", f"{lan[1].address}:7099"],
        env=cluster.env | {"HOPLITE_MP_CONNECT_TIMEOUT_S": "600"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert status.stderr is not None
    with status.stderr as said:
        wait = said.readline()
        lan[1].signal(status, signal.SIGKILL)
        assert status.wait(PATIENCE_S) != 0
        assert said.read() == ""
    assert wait == f"hoplite-mp: waiting for {lan[1].address}:7099 ... (Connection refused)\n"
