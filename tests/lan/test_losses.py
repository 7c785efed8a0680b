"""Hosts are killed, and what only they held is made again, was elsewhere, or is named as lost."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import HOPLITE, PATIENCE_S, UpCluster
from tests.support.lan_programs import run_with_losses

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.usefixtures("lan_permitted")
def test_results_are_made_again_and_what_was_put_is_lost(tmp_path: Path) -> None:
    """Of a killed host: once for all who ask, not before; not what must not run twice. The error of
    what was put there names it, and so does that of a lost result which needs that."""
    said = run_with_losses(
        3,
        tmp_path,
        """
        import threading
        future = only_at("h3", "again")
        other = only_at("h3", "once", retries=0)
        early = only_at("h3", "early")
        def put_there():
            return hoplite_mp.current().put(np.ones(200_000))
        ref = c.options(node=ids["h3"]).submit(put_there).result()
        made = only_at("h3", "needs", ref)
        def late():
            while not os.path.exists(gate):
                time.sleep(0.005)
            return np.ones(200_000)
        gate = GATE
        begun = c.reduce([early, c.submit(late)])  # one source is ready, and lost before the other
        killed("h3")
        open(gate, "w").close()
        print(float(c.get(begun)[0]), begun.contributors, runs("early"))
        assert runs("again") == 1
        got = []
        def get(value=None):
            got.append(float(c.get(future.ref)[-1] if value is None else value[-1]))
        threads = [threading.Thread(target=get) for _ in range(4)]
        [thread.start() for thread in threads]
        tasks = [c.submit(lambda x: float(x[-1]), future) for _ in range(4)]
        total = c.reduce([future, c.put(np.ones(200_000))])
        got += [task.result(30) for task in tasks]
        [thread.join(30) for thread in threads]
        assert future.result()[0] == 1.0
        print(got == [1.0] * 8, float(c.get(total)[0]), runs("again"))
        why = lost(other)
        print(ids["h3"] in why, "retries=0" in why, runs("once"))
        print(ids["h3"] in lost(ref), ids["h3"] in lost(made))
        """,
    )
    assert said == ["2.0 (0, 1) 2", "True 2.0 2", "True True 1", "True True"]


@pytest.mark.soak
@pytest.mark.usefixtures("lan_permitted")
def test_a_chain_over_two_killed_hosts(tmp_path: Path) -> None:
    """Steps that nobody holds any more are made again, too; without anybody's bytes meanwhile."""
    said = run_with_losses(
        4,
        tmp_path,
        """
        first = only_at("h3", "first")
        second = only_at("h4", "second", first)
        third = only_at("h3", "third", second)
        del first, second
        killed("h3", "h4")
        print(float(third.result(30)[-1]), runs("first"), runs("second"), runs("third"))
        """,
    )
    assert said == ["3.0 2 2 2"]


@pytest.mark.usefixtures("lan_permitted")
def test_a_second_copy_outlives_either_holder(tmp_path: Path) -> None:
    said = run_with_losses(
        4,
        tmp_path,
        """
        for wrong in (0, 9, True, 1.5):
            try:
                c.put(1, copies=wrong)
            except ValueError as error:
                pass
            else:
                raise AssertionError(wrong)
        data = np.random.default_rng(3).standard_normal(300_000)
        def put_there(data):
            inner = hoplite_mp.current()
            ref = inner.put(data, copies=2)
            return ref, inner.locations(ref)
        def place(data):
            mine = c.put(data, copies=2)
            (second,) = set(c.locations(mine)) - {ids["h1"]}
            first = next(node for node in ids.values() if node not in (ids["h1"], second))
            moved, at = c.options(node=first).submit(put_there, data).result()
            assert len(at) == 2 and first in at
            return mine, second, moved, first
        def check(ref):
            print(np.array_equal(c.get(ref), data), c.submit(np.sum, ref).result() == data.sum())
        c.submit(np.sum, place(np.ones(3))[0]).result()
        before = counts()
        mine, second, moved, first = place(data)
        hosts = {node: host for host, node in ids.items()}
        killed(hosts[first])  # the owner of this one
        check(moved)
        killed(hosts[second])  # who has the second copy of that one
        check(mine)
        del mine, moved
        print(grown(before))
        """,
    )
    assert said == ["True True", "True True", "{}"]


@pytest.mark.usefixtures("lan_permitted")
def test_who_dies_while_a_copy_is_on_its_way_is_replaced(tmp_path: Path) -> None:
    said = run_with_losses(
        3,
        tmp_path,
        """
        import threading
        data = np.random.default_rng(3).standard_normal(1 << 22)
        c.submit(np.sum, c.put(np.ones(3), copies=2)).result()
        made = []
        putting = threading.Thread(target=lambda: made.append(c.put(data, copies=2)))
        putting.start()
        while c.stats()["nodes"]["h1"]["bytes_received"] < 1 << 20:
            time.sleep(0.01)
        (second,) = [host for host, node in ids.items() if node == "h1"]
        killed(second)
        putting.join()
        print(c.locations(made[0]) == ["h0", "h2"])
        print(c.options(node="h2").submit(np.sum, made[0]).result() == data.sum())
        try:
            c.put(data, copies=3)
        except ValueError as error:
            print(error)
        """,
        "120mbit",
    )
    alone = "copies=3: each copy needs a different node; this cluster has 2"
    assert said == ["True", "True", alone]


@pytest.mark.soak
def test_a_broadcast_whose_object_loses_its_owner(tmp_path: Path) -> None:
    """The bytes come from another host that has it whole; then all goes with the last ref."""
    said = run_with_losses(
        4,
        tmp_path,
        """
        import threading
        def put_there(count):
            return [hoplite_mp.current().put(np.full(count, 7.0))]
        c.options(node=ids["h2"]).submit(put_there, 3).result()
        before = counts()
        future = c.options(node=ids["h2"]).submit(put_there, 1 << 22)
        (ref,) = future.result()
        del future
        c.broadcast(ref, to=[ids["h3"]]).result()
        ends = []
        def send_on():
            try:
                ends.append(c.broadcast(ref, to=[ids["h4"]]).result(timeout=60))
            except Exception as error:
                ends.append(repr(error))
        thread = threading.Thread(target=send_on)
        thread.start()
        received = lambda: c.stats()["nodes"][ids["h4"]]["bytes_received"]
        while received() < 1 << 20:
            time.sleep(0.01)
        killed("h2")
        thread.join(60)
        print(*ends)
        print({ids["h3"], ids["h4"]} <= set(c.locations(ref)))
        print(c.get(ref, timeout=30)[0])
        del ref, before[ids["h2"]]
        print(grown(before))
        """,
        "200mbit",
    )
    assert said == ["None", "True", "7.0", "{}"]


def test_a_host_dies_and_the_others_go_on(lan_permitted: None) -> None:
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        program = """
        def work(i):
            time.sleep(0.1)
            return os.uname().nodename
        while len(set(c.map(work, range(12)))) < 3:
            pass
        futures = [c.submit(work, i) for i in range(30)]
        there = c.options(node=[n for n in c.nodes if n.host == "h3" and n.workers])
        bound = [there.submit(time.sleep, 600) for i in range(30)]
        print("sent", flush=True)
        names = [f.result(timeout=40) for f in futures]
        assert len(names) == 30
        lost = [f for f in bound if isinstance(f.exception(40), hoplite_mp.NodeLostError)]
        assert len(lost) > 20
        assert isinstance(there.submit(work, 1).exception(40), hoplite_mp.NodeLostError)
        print(sorted(set(c.map(work, range(12)))))
        """
        source = (
            "import os, sys, time, numpy as np, hoplite_mp\n"
            f"with hoplite_mp.Cluster(address={cluster.address!r}, tls=False, memory='256MiB')"
            " as c:\n" + textwrap.indent(textwrap.dedent(program), "    ")
        )
        driver = lan[1].popen(
            [sys.executable, "-c", source], env=cluster.env, stdout=subprocess.PIPE, text=True
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "sent\n"
        lan[2].kill()
        assert driver.stdout.readline() == "['h1', 'h2']\n"
        assert driver.wait(PATIENCE_S) == 0
        driver.stdout.close()
        seen = lan[1].run(
            [*HOPLITE, "status", cluster.address, "--no-tls"],
            env=cluster.env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
        assert re.search(r"^h\d+ \(h3\) was lost \d+ s ago$", seen.stdout, re.M)
        del cluster.joined[1]
        assert cluster.end() == [0, 0]


@pytest.mark.usefixtures("lan_permitted")
def test_a_peer_begins_again_while_the_others_wait_for_it(tmp_path: Path) -> None:
    """Its host is killed; it forms its Group anew with the other, whose process is not free."""
    said = run_with_losses(
        3,
        tmp_path,
        """
        def peer(rank):
            while True:
                with hoplite_mp.current().group("pair", size=2, rank=rank, timeout=30) as g:
                    try:
                        for step in range(10**9):
                            mine = np.full(1000, rank + 1.0)
                            mine[-1] = os.path.exists(GATE)  # both end in the same step
                            total = g.allreduce(mine)
                            open(GATE + os.uname().nodename, "w").close()
                            if len(g.contributors) < 2:
                                break
                            if total[-1]:
                                return float(total[0]), os.uname().nodename
                            time.sleep(0.01)
                    except hoplite_mp.PeerLostError:
                        pass
        futures = c.spmd(peer, 2, node=[ids["h2"], ids["h3"]])
        while not (os.path.exists(GATE + "h2") and os.path.exists(GATE + "h3")):
            time.sleep(0.01)
        killed("h3")
        open(GATE, "w").close()
        print(*[future.result(30) for future in futures])
        """,
    )
    assert said == ["(3.0, 'h2') (3.0, 'h2')"]


@pytest.mark.usefixtures("lan_permitted")
def test_get_that_skips_failures_skips_refs_of_another_host_that_are_gone(tmp_path: Path) -> None:
    """One that nobody holds, and one that was lost with its host."""
    program = """
    import pickle
    def name_only():
        return pickle.dumps(hoplite_mp.current().put(np.ones(4)))  # the bytes hold nothing
    name = c.options(node=ids["h2"]).submit(name_only).result()
    deadline = time.monotonic() + 30
    while c.get([freed := pickle.loads(name)], errors="skip"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone = only_at("h2", "a", retries=0)
    killed("h2")
    unknown = pickle.loads(name)  # its host is no part of the cluster any more
    refs = [c.submit(abs, -1), freed, gone, unknown, c.put(2)]
    print(c.get(refs, errors="skip", timeout=30))
    """
    assert run_with_losses(2, tmp_path, program) == ["[1, 2]"]
