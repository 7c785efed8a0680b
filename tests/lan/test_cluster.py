"""Clusters of emulated hosts, started by the command line as a user would."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import HOPLITE, PATIENCE_S, ROOT, TLS_FIRST, TOKEN, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("as_users_start_them")


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_FIRST)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    made = UpCluster(lan, tls=request.param, attaches=not request.param)
    yield made
    assert made.end() == [0, 0, 0]


def test_up_says_how_to_join(cluster: UpCluster) -> None:
    assert cluster.line.startswith(f"hoplite-mp join {cluster.address}")
    assert TOKEN not in cluster.line


def test_tasks_run_on_every_host(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        """
        def where(i):
            time.sleep(0.05)
            return os.uname().nodename
        deadline = time.monotonic() + 30
        seen = set()
        while len(seen) < 3 and time.monotonic() < deadline:
            seen |= set(c.map(where, range(12)))
        print(sorted(seen))
        """,
    )
    assert out.strip() == "['h1', 'h2', 'h3']"


def test_big_arrays_there_and_back(cluster: UpCluster, lan: Lan) -> None:
    """As arguments by ref and by value, and as results; every element is compared."""
    out = cluster.run(
        lan[2],
        """
        rng = np.random.default_rng(1)
        data = rng.standard_normal(2_000_000)
        ref = c.put(data)
        def double(x, i):
            return x * 2 + i
        got = [f.result() for f in [c.submit(double, ref, i) for i in range(6)]]
        assert all(np.array_equal(g, data * 2 + i) for i, g in enumerate(got))
        got = c.submit(double, data, 5).result()
        assert np.array_equal(got, data * 2 + 5)
        chained = c.submit(double, c.submit(double, ref, 1), 2)
        assert np.array_equal(chained.result(), (data * 2 + 1) * 2 + 2)
        print("equal")
        """,
    )
    assert out.strip() == "equal"


def test_errors_keep_their_type(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        """
        def fail(i):
            raise KeyError(f"no {i}")
        for i in range(8):
            error = c.submit(fail, i).exception()
            assert type(error) is KeyError and error.args == (f"no {i}",), error
            assert "in fail" in str(error.__cause__)
        print("all")
        """,
    )
    assert out.strip() == "all"


def test_refs_in_results_and_nested_tasks(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[0],
        """
        def make(n):
            inner = hoplite_mp.current()
            refs = [inner.put(np.full(200_000, float(i))) for i in range(n)]
            return refs, inner.submit(sum, [1, 2, n]).result()
        for n in (1, 2, 3):
            refs, total = c.submit(make, n).result()
            assert total == 3 + n
            assert [float(x[0]) for x in c.get(refs)] == [float(i) for i in range(n)]
        print("ok")
        """,
    )
    assert out.strip() == "ok"


def test_refs_inside_a_large_result_of_another_host(cluster: UpCluster, lan: Lan) -> None:
    """The runner frees its copy, and drops the refs inside, when the bytes are here. They were lost
    if they did not travel with the message about the task's end."""
    out = cluster.run(
        lan[1],
        """
        def make(nbytes):
            inner = [hoplite_mp.current().put(np.full(2000, i)) for i in range(20)]
            return inner + [np.zeros(nbytes, np.uint8)]
        there = [c.options(node=node) for node in c.nodes if node.workers]
        for nbytes in (10, 1_000_000):
            made = [one.submit(make, nbytes) for one in there]
            brought = [one.submit(make, nbytes) for one in there]
            for future in brought:  # the bytes come everywhere, and this process does not read them
                assert [one.submit(len, future).result(30) for one in there] == [21] * len(there)
            read = [future.result(30) for future in made]
            time.sleep(0.5)
            for result in read + [future.result(30) for future in brought]:
                assert [int(c.get(ref)[0]) for ref in result[:-1]] == list(range(20))
        print("held")
        """,
    )
    assert out.strip() == "held"


def test_reductions_over_sources_of_all_hosts(cluster: UpCluster, lan: Lan) -> None:
    """They are brought to the caller's host and folded there; the values are numpy's."""
    out = cluster.run(
        lan[2],
        """
        def make(i):
            time.sleep(0.02)
            return np.random.default_rng(i).integers(0, 1 << 40, 300_000)
        futures = [c.submit(make, i) for i in range(9)]
        total = c.reduce(futures)
        assert np.array_equal(c.get(total), sum(make(i) for i in range(9)))
        assert total.contributors == tuple(range(9))
        some = c.reduce([c.submit(make, i) for i in range(6)], op="max", num=4)
        value, chosen = c.get(some), some.contributors
        assert len(chosen) == 4
        assert np.array_equal(value, np.max([make(i) for i in chosen], axis=0))
        again = c.submit(np.sum, c.reduce(futures, op="min"))
        assert again.result() == np.min([make(i) for i in range(9)], axis=0).sum()
        print("equal")
        """,
    )
    assert out.strip() == "equal"


def test_a_worker_dies_and_its_task_is_tried_again(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        """
        def die(i):
            os.kill(os.getpid(), 9)
        for i in range(3):
            error = c.options(retries=1).submit(die, i).exception()
            assert isinstance(error, hoplite_mp.WorkerLostError), error
            assert "tried 2 times" in str(error), error
        assert c.submit(pow, 2, 5).result() == 32
        print("ok")
        """,
    )
    assert out.strip() == "ok"


def test_deleted_and_cancelled(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[2],
        """
        ref = c.put(np.zeros(300_000))
        c.delete(ref)
        try:
            c.submit(np.sum, ref).result()
        except hoplite_mp.ObjectLostError:
            print("deleted")
        slow = [c.submit(time.sleep, 30) for _ in range(9)]
        time.sleep(0.3)
        assert all(f.cancel(force=True) for f in slow)
        assert all(f.cancelled() for f in slow)
        assert c.submit(abs, -3).result(timeout=20) == 3
        print("cancelled")
        """,
    )
    assert out.split() == ["deleted", "cancelled"]


def test_a_wrong_token_and_nobody_there(cluster: UpCluster, lan: Lan) -> None:
    for env, text in (
        ({"HOPLITE_MP_TOKEN": "another token of good length"}, "AuthError"),
        ({}, "AuthError"),
    ):
        code = (
            "import hoplite_mp\n"
            f"try: hoplite_mp.Cluster(address={cluster.address!r}, "
            f"tls={None if cluster.tls else False})\n"
            "except hoplite_mp.HopliteError as error: print(type(error).__name__)"
        )
        done = lan[1].run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT), **env},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.stdout.strip() == text
    nobody = lan[1].run(
        [*HOPLITE, "join", f"{lan[2].address}:7001", "--wait", "0.5"],
        env=cluster.env,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert nobody.returncode == 1
    assert "7001" in nobody.stderr
    assert len(nobody.stderr.strip().splitlines()) == 1


def test_tasks_are_bound_to_nodes(cluster: UpCluster, lan: Lan) -> None:
    """Each runs where it must, whoever is free; also after the death of a worker."""
    out = cluster.run(
        lan[1],
        """
        import signal
        deadline = time.monotonic() + 30
        while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        def where(path=None):
            if path and not os.path.exists(path):
                open(path, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
            return os.uname().nodename
        for node in sorted((n for n in c.nodes if n.workers), key=lambda n: n.host):
            view = c.options(node=node)
            seen = set(view.map(where, [None] * 12, chunksize=1))
            again = view.submit(where, "died").result()
            print(node.host, sorted(seen), again)
        both = c.options(node=[node.id for node in c.nodes if node.host in ("h1", "h3")])
        print(sorted({f.result() for f in [both.submit(where) for _ in range(6)]}))
        for other in (n for n in c.nodes if not n.workers):  # the driver's own
            try:
                c.options(node=other)
            except ValueError as error:
                print("no workers" in str(error))
        with c.options(node=node).executor(1) as own:
            print(own.submit(where).result() == node.host)
        """,
    )
    assert out.splitlines() == [
        "h1 ['h1'] h1",
        "h2 ['h2'] h2",
        "h3 ['h3'] h3",
        "['h1', 'h3']",
        *["True"] * (1 if cluster.attaches else 2),
    ]


def test_what_waits_behind_a_long_task_is_stolen_back(
    cluster: UpCluster, lan: Lan, tmp_path: Path
) -> None:
    """Two tasks are sent ahead of time to a host whose worker is busy: others run them."""
    out = cluster.run(
        lan[1],
        f"""
        go = {str(tmp_path / "go")!r}
        deadline = time.monotonic() + 30
        while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        def long_on_one(i):
            time.sleep(0.02)
            while os.uname().nodename == "h3" and not os.path.exists(go):
                time.sleep(0.02)
            return os.uname().nodename
        futures = [c.submit(long_on_one, i) for i in range(30)]
        done, late = c.wait(futures, num=29, timeout=40)
        open(go, "w").close()
        assert len(done) == 29, len(done)
        names = [f.result() for f in futures]
        print(names.count("h3"), sorted(set(names)))
        """,
    )
    assert out == "1 ['h1', 'h2', 'h3']\n"


def test_arguments_come_while_the_worker_is_busy(
    cluster: UpCluster, lan: Lan, tmp_path: Path
) -> None:
    out = cluster.run(
        lan[1],
        f"""
        go = {str(tmp_path / "go")!r}
        def is_busy():
            while not os.path.exists(go):
                time.sleep(0.02)
        deadline = time.monotonic() + 30
        while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        node = [n for n in c.nodes if n.host == "h3" and n.workers][0]
        there = c.options(node=node)
        there.submit(abs, -1).result()
        ref = c.put(np.ones(1 << 18))
        assert node.id not in c.locations(ref)
        busy = there.submit(is_busy)
        needs = there.submit(np.sum, ref)
        deadline = time.monotonic() + 40
        while node.id not in c.locations(ref) and time.monotonic() < deadline:
            time.sleep(0.02)
        print(node.id in c.locations(ref))
        open(go, "w").close()
        print(float(needs.result()))
        """,
    )
    assert out == f"True\n{float(1 << 18)}\n"


def test_status(cluster: UpCluster, lan: Lan) -> None:
    command = [*HOPLITE, "status", cluster.address, *([] if cluster.tls else ["--no-tls"])]
    rows: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(rows) < 3 and time.monotonic() < deadline:  # they may still be joining
        done = lan[1].run(
            command, env=cluster.env, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0
        head, *rows = done.stdout.splitlines()
    assert head.split()[:4] == ["node", "address", "host", "workers"]
    assert sorted(row.split()[1:4] for row in rows) == [
        [host.address, f"h{number}", "1"] for number, host in enumerate(lan, 1)
    ]
    command[command.index(cluster.address)] = f"{lan[0].address}:7999"
    done = lan[1].run(
        command,
        env={**cluster.env, "HOPLITE_MP_CONNECT_TIMEOUT_S": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "7999" in done.stderr.splitlines()[-1]
