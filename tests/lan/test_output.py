"""What tasks print on other hosts appears at the driver that they come from."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, TLS_OR_PLAIN, UpCluster
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host

# output_wait_s: on a busy machine a driver that lives may read nothing for some seconds.
WAIT_S, DEAF_WAIT_S = 60.0, 2.0
LABEL = re.compile(r"\(worker (\d+)@h(\d+)\) (.*)")
HEAD = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
places = {node.host: node for node in c.nodes if node.workers}
"""


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    env = {"HOPLITE_MP_OUTPUT_WAIT_S": str(WAIT_S), "PYTHONUNBUFFERED": ""}
    made = UpCluster(lan, tls=request.param, **env)
    yield made
    assert made.end() == [0, 0, 0]


@pytest.fixture
def impatient(lan_permitted: None) -> Iterator[UpCluster]:
    """Nodes that drop the lines of a driver that does not read, soon."""
    env = {"HOPLITE_MP_OUTPUT_WAIT_S": str(DEAF_WAIT_S), "PYTHONUNBUFFERED": ""}
    with Lan(3) as lan:
        made = UpCluster(lan, tls=False, **env)
        yield made
        assert made.end() == [0, 0, 0]


def start(cluster: UpCluster, host: Host, program: str, **options: Any) -> subprocess.Popen[str]:
    return host.popen(
        cluster.program(HEAD + program),
        env=cluster.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(cluster: UpCluster, host: Host, program: str) -> tuple[list[str], list[str]]:
    """A driver from beginning to end: lines of its stdout, and of its stderr."""
    process = start(cluster, host, program)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out.splitlines(), without_warning(err)


def without_warning(err: str) -> list[str]:
    return [line for line in err.splitlines() if not line.startswith("tls=False")]


def parsed(lines: list[str]) -> list[tuple[int, int, str]]:
    """(slot, node, text) of each line, all of which are workers'."""
    found = [LABEL.fullmatch(line) for line in lines]
    assert None not in found, lines
    return [(int(one[1]), int(one[2]), one[3]) for one in found if one is not None]


def test_both_streams_with_the_number_of_the_node(cluster: UpCluster, lan: Lan) -> None:
    out, err = run(
        cluster,
        lan[1],
        """
def talk(i):
    print("out", i)
    print("err", i, file=sys.stderr)
for host in ("h1", "h2", "h3"):
    c.options(node=places[host]).submit(talk, places[host].id).result()
""",
    )
    for name, lines in (("out", out), ("err", err)):
        said = parsed(lines)
        assert [text for _, node, text in said] == [f"{name} h{node}" for _, node, _ in said]
        assert len({node for _, node, _ in said}) == len(said) == 3


def test_last_words_bytes_and_long_lines(cluster: UpCluster, lan: Lan) -> None:
    """Of the last tasks, without an end of line, of a killed worker, of a process of a task."""
    out, err = run(
        cluster,
        lan[2],
        """
import subprocess
there = c.options(node=places["h1"], retries=0)
def last():
    os.write(1, b"raw \\xff\\xfe")
    os.write(2, b"last words")
    os.kill(os.getpid(), 9)
assert isinstance(there.submit(last).exception(), hoplite_mp.WorkerLostError)
def long():
    print("x" * 300_000)
    subprocess.run(["echo", "echoed"])
    print("no end", end="")
there.submit(long).result()
""",
    )
    raw, *said = [text for _, _, text in parsed(out)]
    assert raw == "raw \ufffd\ufffd"
    assert "".join(said[:-2]) == "x" * 300_000
    assert [len(text) for text in said[:-3]] == [64 << 10] * 4
    assert said[-2:] == ["echoed", "no end"]
    assert [text for _, _, text in parsed(err)] == ["last words"]


def test_two_drivers_get_their_own(cluster: UpCluster, lan: Lan) -> None:
    """On the same workers, in turns; nothing is lost, and each worker's lines stay in order."""
    program = """
def talk(name, i):
    for k in range(20):
        print(name, i, k, "." * 50)
        print(name, i, k, file=sys.stderr)
    if i % 7 == 0:
        os.write(1, f"{name} {i} rest".encode())
there = [c.options(node=places[host]) for host in ("h1", "h2")]
futures = [there[i % 2].submit(talk, NAME, i) for i in range(100)]
names = set(map(str, [f.result() for f in futures]))
"""
    drivers = [
        start(cluster, lan[at], program.replace("NAME", repr(name)))
        for at, name in ((1, "anna"), (2, "bert"))
    ]
    for process, name in zip(drivers, ("anna", "bert"), strict=True):
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        for stream in (out.splitlines(), without_warning(err)):
            lines = parsed(stream)
            assert {text.split()[0] for _, _, text in lines} == {name}
            numbers = [tuple(map(int, text.split()[1:3])) for _, _, text in whole(lines)]
            assert sorted(numbers) == [(i, k) for i in range(100) for k in range(20)]
            by_worker = collections.defaultdict(list)
            for slot, node, text in whole(lines):
                by_worker[slot, node].append(tuple(map(int, text.split()[1:3])))
            for said in by_worker.values():
                assert [k for _, k in said] == list(range(20)) * (len(said) // 20)
            assert len({node for _, node in by_worker}) == 2
        assert out.count(f"{name} 7 rest") == 1


def whole(lines: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Without the lines that had no end, which may have one of the next task behind them."""
    found = []
    for slot, node, text in lines:
        text = re.sub(r"^\w+ \d+ rest", "", text)
        if text:
            found.append((slot, node, text))
    return found


def test_nested_tasks_executors_and_groups(cluster: UpCluster, lan: Lan) -> None:
    """Whoever submitted them, wherever they run: they came from that driver."""
    out, err = run(
        cluster,
        lan[1],
        """
def inner(word):
    print(word, "inner", os.uname().nodename)
def outer(word, node):
    print(word, "outer", os.uname().nodename)
    hoplite_mp.current().options(node=node).submit(inner, word).result()
c.options(node=places["h1"]).submit(outer, "own", places["h1"].id).result()
def begin():
    print("begin executor", os.uname().nodename)
with c.executor(1, node=places["h3"], initializer=begin) as e:
    e.submit(print, "in executor h3").result()
def peer(rank):
    with hoplite_mp.current().group("talk", 3, rank, timeout=30) as g:
        g.allreduce(np.ones(1))
        print("peer", rank)
[f.result() for f in c.spmd(peer, 3)]
""",
    )
    assert not err
    said = collections.Counter(text for _, _, text in parsed(out))
    assert said == collections.Counter(
        [
            *("own outer h1", "own inner h1", "begin executor h3", "in executor h3"),
            *("peer 0", "peer 1", "peer 2"),
        ]
    )


def test_a_nested_task_on_a_third_host(cluster: UpCluster, lan: Lan) -> None:
    """Its lines come over another connection than the end of the outer task, and the driver leaves
    at once."""
    out, _ = run(cluster, lan[1], "print(*[places[host].id for host in ('h1', 'h3')])\n")
    near, far = out[0].split()
    program = cluster.program(
        f"""
def inner():
    print("inner", os.uname().nodename)
def outer():
    print("outer", os.uname().nodename)
    hoplite_mp.current().options(node={far!r}).submit(inner).result()
c.options(node={near!r}).submit(outer).result()
"""
    )
    for _ in range(3):
        done = lan[1].run(
            program, env=cluster.env, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        said = sorted(text for _, _, text in parsed(done.stdout.splitlines()))
        assert said == ["inner h3", "outer h1"]


MANY, MOST = 40_000, 200_000


def speaking(lines: int) -> str:
    return f"""
def talk():
    for i in range({lines}):
        print(i, "." * 60)
    return True
done = c.options(node=places["h3"]).submit(talk)
"""


@pytest.mark.soak
def test_a_slow_driver_misses_nothing(impatient: UpCluster) -> None:
    """It takes pieces with pauses, in all longer than a node's patience with a deaf one."""
    program = speaking(MOST) + "assert done.result()\n"
    process = start(impatient, impatient.lan[1], program)
    assert process.stdout is not None
    pieces, until = [], time.monotonic() + 5 * DEAF_WAIT_S
    while time.monotonic() < until:
        pieces.append(os.read(process.stdout.fileno(), 1 << 16))
        time.sleep(0.05)
    assert sum(map(len, pieces)) < MOST * 60  # it was slow
    rest, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    lines = parsed((b"".join(pieces).decode() + rest).splitlines())
    assert [int(text.split()[0]) for _, _, text in lines] == list(range(MOST))


def test_a_driver_that_does_not_read(impatient: UpCluster) -> None:
    """Workers end its tasks and serve others; later it learns what it has missed."""
    cluster, lan = impatient, impatient.lan
    deaf = start(
        cluster,
        lan[1],
        speaking(MANY) + "assert done.result()\nsys.stderr.write('done\\n')\nsys.stdin.readline()\n"
        "c.options(node=places['h3']).submit(print, 'the end').result()\n"
        "sys.stdin.readline()\n",
    )
    assert deaf.stdout is not None
    assert deaf.stderr is not None
    assert deaf.stdin is not None
    while deaf.stderr.readline() != "done\n":  # though nobody has read a line
        assert deaf.poll() is None
    another = "c.options(node=places['h3']).submit(print, 'for another').result()\n"
    # A driver without a processor for DEAF_WAIT_S is a deaf one, too.
    eventually(
        lambda: [text for *_, text in parsed(run(cluster, lan[2], another)[0])] == ["for another"]
    )
    texts: list[str] = []
    while not texts or "dropped" not in texts[-1]:
        texts += [text for _, _, text in parsed([deaf.stdout.readline().rstrip("\n")])]
    deaf.stdin.write("go\n")
    deaf.stdin.flush()
    while texts[-1] != "the end":
        texts += [text for _, _, text in parsed([deaf.stdout.readline().rstrip("\n")])]
    deaf.stdin.close()
    assert deaf.wait(PATIENCE_S) == 0
    deaf.stdout.close()
    deaf.stderr.close()
    *numbers, dropped, _ = texts
    kept = [int(text.split()[0]) for text in numbers]
    assert kept == list(range(len(kept)))
    said = re.fullmatch(
        rf"(\d+) lines were dropped here: no line was read for {DEAF_WAIT_S:g} s.*", dropped
    )
    assert said is not None, dropped
    assert len(kept) + int(said[1]) == MANY


def test_a_driver_that_dies_takes_its_lines_with_it(cluster: UpCluster, lan: Lan) -> None:
    dying = start(
        cluster,
        lan[1],
        """
def talk():
    print("begin", flush=True)
    while True:
        print("more" * 100)
c.options(node=places["h3"]).submit(talk).result()
""",
    )
    assert dying.stdout is not None
    assert LABEL.fullmatch(dying.stdout.readline().strip())
    lan[1].signal(dying, 9)
    dying.communicate(timeout=PATIENCE_S)
    out, err = run(cluster, lan[2], "c.options(node=places['h3']).submit(print, 'mine').result()\n")
    assert [text for _, _, text in parsed(out)] == ["mine"]
    assert not err


def test_lines_of_tasks_on_other_hosts_appear_before_their_results(lan_permitted: None) -> None:
    with Lan(2) as lan:
        cluster = UpCluster(lan, tls=False, workers=1)
        program = """
while sum(node.workers for node in c.nodes) < 2:
    time.sleep(0.02)
hosts = [c.options(node=node) for node in c.nodes if node.workers]
def prints(i):
    print("line", i)
    print("more", i)
    return os.uname().nodename
for i in range(60):
    hosts[i % 2].submit(prints, i).result(30)
    print("result", i, flush=True)
"""
        for host in lan:
            out = cluster.run(host, program)
            found = [line.split(") ")[-1] for line in out.splitlines()]
            assert found == [
                f"{what} {i}" for i in range(60) for what in ("line", "more", "result")
            ]
        assert cluster.end() == [0, 0]
