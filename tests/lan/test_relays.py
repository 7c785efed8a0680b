"""Two hosts that cannot reach each other, and a third one that both reach: everything works, over
a port that the third one lends."""

from __future__ import annotations

import socket
import textwrap
import threading
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._node.io.forward import Forward
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.sockets import listen
from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, TLS_OR_PLAIN, UpCluster
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def apart(lan_permitted: None, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    """Four hosts. The second and the third are told at once that no way leads to the other; what
    the fourth sends to the second is lost without a word."""
    with Lan(4) as lan:
        lan[1].separate(lan[2])
        lan[2].separate(lan[1])
        lan[3].separate(lan[1], "blackhole")
        made = UpCluster(lan, tls=request.param)
        yield made
        assert made.end() == [0, 0, 0, 0]


def said(cluster: UpCluster, where: int, program: str) -> str:
    """What a driver on that host prints, once all nodes are there: `hosts`, in order of names."""
    everybody = """
        deadline = time.monotonic() + 30
        hosts = []
        while len(hosts) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
            hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
        """
    program = textwrap.dedent(everybody) + textwrap.dedent(program)
    return cluster.run(cluster.lan[where], program).strip()


@pytest.mark.parametrize("here", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_tasks_and_objects_pass(apart: UpCluster, here: int) -> None:
    """Of each of those, on all others: small and large, as arguments and as results."""
    out = said(
        apart,
        here,
        """
        data = np.random.default_rng(1).standard_normal(1_000_000)
        ref = c.put(data)
        def double(x, i):
            return os.uname().nodename, x * 2 + i
        for node in hosts:
            there = c.options(node=node)
            futures = [there.submit(double, ref, i) for i in range(3)]
            for i, future in enumerate(futures):
                where, got = future.result(timeout=40)
                assert where == node.host and np.array_equal(got, data * 2 + i)
            assert list(there.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        print("equal")
        """,
    )
    assert out == "equal"


def test_collectives_pass(apart: UpCluster) -> None:
    out = said(
        apart,
        2,
        """
        def make(i):
            return np.full(500_000, i + 1.0)
        refs = [c.options(node=n).submit(make, i) for i, n in enumerate(hosts)]
        everywhere = c.allreduce(refs, to=hosts)
        assert np.all(c.get(everywhere, timeout=40) == 10.0)
        assert set(c.locations(everywhere)) >= {node.id for node in hosts}
        mine = c.put(np.arange(1_000_000))
        c.broadcast(mine).result(timeout=40)
        assert set(c.locations(mine)) >= {node.id for node in hosts}
        print("equal")
        """,
    )
    assert out == "equal"


def test_groups_pass(apart: UpCluster) -> None:
    out = said(
        apart,
        1,
        """
        def peer(rank, large):
            found = []
            with hoplite_mp.current().group("all", 4, rank, timeout=30) as g:
                for size in (10, large):
                    total = g.allreduce(np.full(size, rank + 1.0))
                    found.append(total.size == size and bool(np.all(total == 10.0)))
                    part = g.reduce_scatter(np.full(4 * size, rank + 1.0))
                    found.append(bool(np.all(part == 10.0)))
            return os.uname().nodename, found
        got = [future.result(40) for future in c.spmd(peer, 4, 300_000, node=hosts)]
        assert sorted(host for host, _ in got) == ["h1", "h2", "h3", "h4"], got
        assert all(found == [True] * 4 for _, found in got), got
        print("equal")
        """,
    )
    assert out == "equal"


@pytest.fixture
def echo() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def lent(behind: socket.socket, welcome: Callable[[str], bool] = lambda host: True) -> Forward:
    """A port that leads to that one."""
    endpoint = Endpoint(socket.AF_INET, behind.getsockname())
    return Forward(listen("127.0.0.1", range(1)), [endpoint], welcome)


def test_a_port_carries_both_ways_to_the_last_byte(echo: socket.socket) -> None:
    forward = lent(echo, lambda host: host == "127.0.0.1")
    sent = bytes(range(256)) * 20_000
    came: list[bytes] = []
    with socket.create_connection(("127.0.0.1", forward.port)) as caller:
        callee, _ = echo.accept()
        with callee:

            def read() -> None:
                while data := callee.recv(1 << 16):
                    came.append(data)
                callee.sendall(sent[::-1])
                callee.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=read)
            thread.start()
            caller.sendall(sent)
            caller.shutdown(socket.SHUT_WR)
            back = b""
            while data := caller.recv(1 << 16):
                back += data
            thread.join()
    assert b"".join(came) == sent
    assert back == sent[::-1]
    forward.close()


def test_an_end_of_the_port_ends_what_it_carries(echo: socket.socket) -> None:
    forward = lent(echo)
    with socket.create_connection(("127.0.0.1", forward.port)) as caller:
        callee, _ = echo.accept()
        with callee:
            caller.sendall(b"x")
            assert callee.recv(1) == b"x"
            forward.close()
            caller.settimeout(PATIENCE_S)
            callee.settimeout(PATIENCE_S)
            assert caller.recv(1) == b""
            assert callee.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", forward.port))


def test_a_reset_is_the_end_on_both_sides(echo: socket.socket) -> None:
    forward = lent(echo)
    with socket.create_connection(("127.0.0.1", forward.port)) as caller:
        callee, _ = echo.accept()
        caller.sendall(b"x")
        assert callee.recv(1) == b"x"
        callee.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        callee.close()  # a reset
        caller.settimeout(PATIENCE_S)
        assert caller.recv(1) == b""
    eventually(lambda: forward.connections == 0)
    forward.close()


def test_strangers_get_no_way(echo: socket.socket) -> None:
    forward = lent(echo, lambda host: False)
    with socket.create_connection(("127.0.0.1", forward.port)) as caller:
        caller.settimeout(PATIENCE_S)
        assert caller.recv(1) == b""
    forward.close()
