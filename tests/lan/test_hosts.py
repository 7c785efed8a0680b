"""Cluster(hosts=): nodes that a program starts on other hosts, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, ROOT, TLS_FIRST, TOKEN, all_joins_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host

ENV = {
    "HOPLITE_MP_TOKEN": TOKEN,
    "PYTHONPATH": str(ROOT),
    "HOPLITE_MP_HOSTS_COMMAND": f"{sys.executable} -m tests.lan.remote client {{host}} "
    f"{sys.executable} -m hoplite_mp {{arguments}}",
}


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        servers = []
        for host in list(made)[1:]:
            server = host.popen(
                [sys.executable, "-m", "tests.lan.remote", "serve"],
                env={"PYTHONPATH": str(ROOT), "HOPLITE_MP_MEMORY_BYTES": "128MiB"},
                stdout=subprocess.PIPE,
                text=True,
            )
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            servers.append(server)
        yield made
        for host, server in zip(list(made)[1:], servers, strict=True):
            host.signal(server, 9)
            server.stdout.close()  # type: ignore[union-attr]
            server.wait()


def run(host: Host, program: str) -> subprocess.CompletedProcess[str]:
    source = "import os, signal, sys, time, hoplite_mp\n" + textwrap.dedent(program)
    return host.run(
        [sys.executable, "-c", source],
        env={**ENV, "HOPLITE_MP_MEMORY_BYTES": "128MiB"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("tls", TLS_FIRST)
def test_nodes_are_started_and_end_with_the_cluster(lan: Lan, tls: bool) -> None:
    names = [lan[1].address, f"somebody@{lan[2].address}"]
    done = run(
        lan[0],
        f"""
        with hoplite_mp.Cluster(workers=1, hosts={names!r}, tls={None if tls else False}) as c:
            print(sorted(node.host for node in c.nodes), c.address.startswith("0.0.0.0"))
            print(sorted(c.options(node=n).submit(os.uname).result().nodename for n in c.nodes))
        """,
    )
    assert done.stdout.splitlines() == ["['h1', 'h2', 'h3'] False", "['h1', 'h2', 'h3']"], done
    assert TOKEN not in done.stderr
    assert all_joins_ended(lan)


@pytest.mark.soak
def test_workers_are_added_where_it_is_said(lan: Lan) -> None:
    done = run(
        lan[0],
        f"""
        with hoplite_mp.Cluster(workers=1, hosts={[lan[1].address]!r}) as c:
            def pids(node):
                view = c.options(node=node)
                def work():
                    time.sleep(0.1)
                    return os.getpid()
                deadline, seen = time.monotonic() + 20, set()
                while len(seen) < 3 and time.monotonic() < deadline:
                    seen |= {{f.result() for f in [view.submit(work) for _ in range(6)]}}
                return len(seen)
            before = [node.workers for node in c.nodes]
            for node in c.nodes:
                c.add_workers(3 - node.workers, node)
            print([pids(node) for node in c.nodes], [node.workers for node in c.nodes])
        """,
    )
    assert done.stdout == "[3, 3] [3, 3]\n", done


def test_they_end_with_a_program_that_is_killed(lan: Lan) -> None:
    done = run(
        lan[0],
        f"""
        c = hoplite_mp.Cluster(workers=1, hosts={[lan[1].address]!r})
        print(len(c.nodes), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert (done.stdout, done.returncode) == ("2\n", -9)
    assert all_joins_ended(lan)


@pytest.mark.soak
def test_a_host_that_cannot_join(lan: Lan) -> None:
    done = run(
        lan[0],
        f"""
        try:
            hoplite_mp.Cluster(workers=1, hosts={[lan[1].address, "10.77.0.250"]!r})
        except hoplite_mp.NodeLostError as error:
            print(error)
        for wrong in ("h1", ["h1", "h1"], [5]):
            try:
                hoplite_mp.Cluster(hosts=wrong)
            except ValueError as error:
                print("hosts=" in str(error))
        """,
    )
    first, *others = done.stdout.splitlines()
    assert first.startswith("no node could be started on '10.77.0.250' (exit code 1)"), done
    assert others[-3:] == ["True"] * 3
    assert all_joins_ended(lan)
