"""`doctor`, `bench` and `top` over several hosts: who is there, what is wrong, who has left."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.lan import Lan
from tests.support.clusters import HOPLITE, PATIENCE_S, TLS_OR_PLAIN, TOKEN, UpCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lan import Host

NOBODY = "10.77.0.99"  # an address of the LAN that no host has
COMMAND_S_MAX = 110.0  # three hosts on the cores of one
ELSEWHERE = "192.0.2.1"  # of no network that the hosts know


# A minute of waiting for what does not answer; tests/cli has the commands on one host.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    # A host that is stopped here is to stay one of the cluster.
    made = UpCluster(lan, tls=request.param, HOPLITE_MP_HEARTBEAT_TIMEOUT_S="120")
    made.run(
        lan[0],
        """
        deadline = time.monotonic() + 30
        while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        """,
    )
    yield made
    assert made.end() == [0, 0, 0]


def command(cluster: UpCluster, host: Host, *words: str, **env: str) -> Any:
    """To its end, on that host."""
    tls = [] if cluster.tls else ["--no-tls"]
    return host.run(
        [*HOPLITE, *words, *tls],
        env={**cluster.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=COMMAND_S_MAX,
    )


def doctor(cluster: UpCluster, host: Host, address: str, *words: str, **env: str) -> Any:
    return command(cluster, host, "doctor", address, *words, **env)


def problems(done: Any) -> dict[str, str]:
    """What is a problem, and all that is said about it in one line."""
    found: dict[str, str] = {}
    what = ""
    for line in done.stdout.splitlines():
        level, _, rest = line.partition("  ")
        if level == "problem":
            what, _, words = rest.strip().partition("  ")
            found[what] = words.strip()
        elif level == "" and what:
            found[what] += " " + line.strip()
        else:
            what = ""
    return found


def test_doctor_of_a_good_cluster(cluster: UpCluster, lan: Lan) -> None:
    done = doctor(cluster, lan[1], cluster.address)
    assert done.returncode == 0, done.stdout
    assert "the same on both sides" in done.stdout
    for host in lan:
        assert f"({host.name}, {host.address})" in " ".join(done.stdout.split())
    assert done.stdout.count("round trip in") == 4  # on this host, and at each node
    assert TOKEN not in done.stdout


@pytest.mark.parametrize(
    ("address", "what", "words"),
    [
        ("10.77.0.1:7999", "connection", "Connection refused -> the host is up"),
        (f"{ELSEWHERE}:7000", "route", "no route to"),
        ("nobody.invalid:7000", "name", "there is no host nobody.invalid"),
    ],
)
def test_doctor_of_a_wrong_address(
    cluster: UpCluster, lan: Lan, address: str, what: str, words: str
) -> None:
    done = doctor(cluster, lan[1], address, "--no-start")
    assert done.returncode == 1
    found = problems(done)
    assert list(found) == [what]
    assert words in found[what]


def test_doctor_of_a_host_that_is_off(cluster: UpCluster, lan: Lan) -> None:
    done = doctor(cluster, lan[1], f"{NOBODY}:7000", "--no-start")
    assert done.returncode == 1
    (words,) = problems(done).values()
    assert "No route to host" in words or "no answer" in words
    assert "->" in words


def test_doctor_of_packets_that_are_dropped(cluster: UpCluster, lan: Lan) -> None:
    """As a firewall does it: they leave, and nothing comes back."""
    nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
    lan[1].run(["ip", "neighbour", "replace", NOBODY, *nowhere])
    try:
        done = doctor(cluster, lan[1], f"{NOBODY}:7000", "--no-start")
    finally:
        lan[1].run(["ip", "neighbour", "del", NOBODY, "dev", "eth0"])
    assert done.returncode == 1
    (words,) = problems(done).values()
    assert words.startswith(f"{NOBODY}:7000: no answer")
    assert "A firewall may drop packets" in words


def test_doctor_with_another_token(cluster: UpCluster, lan: Lan) -> None:
    done = doctor(cluster, lan[2], cluster.address, HOPLITE_MP_TOKEN="another token of good length")
    assert done.returncode == 1
    assert "the token is not the cluster's" in problems(done)["handshake"]
    assert "nodes " not in done.stdout  # it was not even tried to join


def test_doctor_without_a_token(cluster: UpCluster, lan: Lan) -> None:
    done = doctor(cluster, lan[2], cluster.address, "--no-start", HOPLITE_MP_TOKEN="")
    assert done.returncode == 1
    assert "there is no token" in problems(done)["token"]


def test_doctor_with_and_without_tls(cluster: UpCluster, lan: Lan) -> None:
    """The other way round than the cluster: it says which."""
    words = [] if not cluster.tls else ["--no-tls"]
    done = lan[1].run(
        [*HOPLITE, "doctor", cluster.address, "--no-start", *words],
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    wanted = "it uses TLS" if cluster.tls else "it does not use TLS"
    assert wanted in problems(done)["handshake"]


def test_doctor_of_other_software(cluster: UpCluster, lan: Lan) -> None:
    """A version of our own that is not the cluster's."""
    code = (
        "import sys, hoplite_mp._version as v; v.__version__ = '99.1.0'; "
        "from hoplite_mp._cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    tls = [] if cluster.tls else ["--no-tls"]
    done = lan[1].run(
        [sys.executable, "-c", code, "doctor", cluster.address, "--no-start", *tls],
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    words = problems(done)["handshake"]
    assert "its software does not match" in words
    assert "99.1.0" in words


@contextlib.contextmanager
def stopped(process: subprocess.Popen[Any]) -> Iterator[None]:
    """The node that was started by that process stands still, its host goes on. Not what has
    entered the host, nor its child: the one stops with the other, and is not ours to continue."""
    (program,) = psutil.Process(process.pid).children()
    found = program.children(recursive=True)
    for one in found:
        one.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in found:
            one.send_signal(signal.SIGCONT)


def test_doctor_of_a_node_that_does_not_answer(cluster: UpCluster, lan: Lan) -> None:
    with stopped(cluster.joined[1]):
        done = doctor(cluster, lan[1], cluster.address)
    assert done.returncode == 1, done.stdout
    words = problems(done)["nodes"]
    assert f"({lan[2].name}, {lan[2].address}) does not answer this host" in words


def test_bench(cluster: UpCluster, lan: Lan) -> None:
    file = lan[1].root / "numbers.json"
    done = command(cluster, lan[1], "bench", cluster.address, "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["nodes"] == 3
    titles = [row["title"] for row in found["rows"]]
    assert sum(title.startswith("no-op on") for title in titles) == 3
    assert sum(title.startswith("64 MiB to") for title in titles) == 3
    assert titles[-2:] == [
        "allreduce of 64 MiB over 3 nodes", "allreduce of 64 MiB over 3 nodes: each link"
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in found["rows"])
    assert found["rows"][-1]["value"] == pytest.approx(
        4 / 3 * (64 << 20) / found["rows"][-2]["value"]
    )


@contextlib.contextmanager
def watching(cluster: UpCluster, host: Host) -> Iterator[Callable[..., None]]:
    """`top` into a pipe; gives a function that reads until a table pleases."""
    tls = [] if cluster.tls else ["--no-tls"]
    process = host.popen(
        [*HOPLITE, "top", cluster.address, "--interval", "0.3", *tls],
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    out = process.stdout

    def until(pleased: Callable[[dict[str, list[str]]], bool]) -> None:
        """Each table: the columns of every host, by its name."""
        end = time.monotonic() + PATIENCE_S
        table: dict[str, list[str]] = {}
        for line in out:
            assert time.monotonic() < end, table
            words = line.split()
            if words[:1] == ["node"]:
                if table and pleased(table):
                    return
                table = {}
            elif len(words) > 5 and words[0].startswith("h"):
                table[words[1]] = words
        pytest.fail("it has ended")

    yield until
    host.signal(process, signal.SIGTERM)
    out.read()
    out.close()
    assert process.wait(PATIENCE_S) == 0


def test_top_shows_what_is_done(cluster: UpCluster, lan: Lan) -> None:
    driver = lan[0].popen(
        cluster.program(
            """
            n3 = [n for n in c.nodes if n.host == "h3" and n.workers]
            end = time.monotonic() + 120
            while time.monotonic() < end and sys.stdin.readline():
                c.wait([c.options(node=n3).submit(abs, i) for i in range(50)])
                print("done", flush=True)
            """
        ),
        env=cluster.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdin is not None
    with watching(cluster, lan[1]) as until:
        until(lambda table: {"h1", "h2", "h3"} <= table.keys())

        def busy(table: dict[str, list[str]]) -> bool:
            driver.stdin.write("go\n")  # type: ignore[union-attr]
            driver.stdin.flush()  # type: ignore[union-attr]
            # node host address workers "7%" of "256" MiB tasks/s done
            return "h3" in table and int(table["h3"][8]) > 0 and int(table["h2"][8]) == 0

        until(busy)
        with stopped(cluster.joined[1]):
            until(lambda table: table["h3"][4:6] == ["no", "answer"])
            until(lambda table: table["h2"][4:6] != ["no", "answer"])
    driver.stdin.close()
    assert driver.wait(PATIENCE_S) == 0


def test_top_when_a_node_leaves_and_when_all_ends(lan_permitted: None) -> None:
    with Lan(2) as lan:
        cluster = UpCluster(lan, tls=False)
        watcher = lan[0].popen(
            [*HOPLITE, "top", cluster.address, "--interval", "0.3", "--no-tls"],
            env=cluster.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with watching(cluster, lan[0]) as until:
            until(lambda table: {"h1", "h2"} <= table.keys())
            lan[1].signal(cluster.joined.pop(), signal.SIGTERM)
            until(lambda table: "h2" not in table and "(h2)" in table)  # a line about the gone host
        assert cluster.end() == [0]
        _, complaint = watcher.communicate(timeout=PATIENCE_S)
        assert watcher.returncode == 1
        assert complaint.splitlines()[-1] == (
            f"hoplite-mp top: the cluster at {cluster.address} has ended"
        )
