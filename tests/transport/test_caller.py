"""Callers over real sockets: whom they reach, and what they say when they do not."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from typing import Any

import pytest

from hoplite_mp._protocol import greetings as g
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.caller import SILENT_S_MAX
from hoplite_mp._transport.listener import Listener
from hoplite_mp._transport.sockets import listen
from hoplite_mp.errors import AuthError, ManagerLostError, ProtocolError
from tests.support.transport import (
    CLUSTER,
    KEY,
    SERVER,
    certificate,
    endpoint,
    knock,
    make_caller,
    make_listener,
    meet,
    other_certificate,
    until,
)


def test_nobody_there_is_a_lost_manager_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, True, now=0.0, timeout_s=10.0)
    caller.turn(0.0)
    until(lambda: caller.deadline > 0.1, lambda: caller.turn(0.0))
    assert caller.deadline == pytest.approx(0.2)  # the next round
    until(lambda: caller.deadline > 5.0, lambda: caller.turn(5.0))
    with pytest.raises(
        ManagerLostError,
        match=rf"^no process at 127\.0\.0\.1:{where[1]} answers for the cluster: "
        r"no answer within 10 s \(127.*refused\); ",
    ):
        caller.turn(10.0)
    caller.close()


def test_rounds_in_which_nobody_is_reached_end_it_also_after_one_that_broke_off() -> None:
    """As when a manager ends while it is called again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        caller = make_caller(where, False, now=0.0, timeout_s=10.0, rounds_max=3)
        until(lambda: caller.deadline > 3.0, lambda: caller.turn(0.0))  # it speaks to somebody
        server.accept()[0].close()
        until(lambda: caller.deadline < 3.0, lambda: caller.turn(0.0))
    for now in (1.0, 2.0):
        until(lambda now=now: caller.deadline > now, lambda now=now: caller.turn(now))  # type: ignore[misc]
    with pytest.raises(ManagerLostError, match=r"cannot be reached .*refused"):
        until(lambda: False, lambda: caller.turn(3.0))
    caller.close()


def test_a_node_that_is_not_there_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, False, role="peer", timeout_s=0.0)
    with pytest.raises(ConnectionError, match="node at 127"):
        caller.wait()


def test_who_is_about_to_start_is_waited_for(opened: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, False, now=0.0)
    until(lambda: caller.deadline > 0.1, lambda: caller.turn(0.0))
    listener = Listener(
        listen("127.0.0.1", [where[1]]),
        key=KEY,
        service="manager",
        cluster=CLUSTER,
        mine=SERVER,
        certificate=None,
        handshake_timeout_s=5,
        pending_handshakes_max=8,
    )
    opened.append(listener)
    called = []

    def turn() -> None:
        opened.extend(one.stream for one in listener.turn(0.3))
        if not called:
            called.extend(filter(None, [caller.turn(0.3)]))

    until(lambda: called, turn)
    opened.append(called[0].stream)


def test_a_silent_address_is_left_for_the_next(opened: list[Any]) -> None:
    """The first accepts and says nothing, the second is somebody else's, the third is right."""
    listener = make_listener(False)
    with_other_id = make_listener(False, mine=g.Introduction(99, SERVER.versions))
    silent = socket.create_server(("127.0.0.1", 0))
    opened += [listener, with_other_id, silent]
    places = [silent.getsockname(), with_other_id.address, listener.address]
    caller = make_caller(
        (), False, endpoints=[endpoint(place) for place in places], now=0.0, host_id=SERVER.host_id
    )
    called, let_in = [], []
    clock = 0.0

    def turn() -> None:
        nonlocal clock
        clock = 5.5
        let_in.extend(listener.turn(clock))
        opened.extend(one.stream for one in with_other_id.turn(clock))
        if not called:
            called.extend(filter(None, [caller.turn(clock)]))

    until(lambda: caller._conversation, lambda: caller.turn(0.0))
    assert caller.deadline == 5.0
    until(lambda: called and let_in, turn)
    assert called[0].peer.host_id == SERVER.host_id
    opened += [called[0].stream, let_in[0].stream]


def test_caller_in_the_line_is_not_timed_out_before_the_first_byte(opened: list[Any]) -> None:
    listener = make_listener(True, pending_handshakes_max=1)
    stranger = knock(listener)
    opened += [listener, stranger]
    until(lambda: listener.strangers == 1, lambda: listener.turn(0.0))
    caller = make_caller(listener.address, True, now=0.0, timeout_s=60.0)
    opened.append(caller)
    until(lambda: caller._conversation, lambda: caller.turn(0.0))
    until(lambda: listener._queue, lambda: listener.turn(0.0))
    assert caller.deadline == SILENT_S_MAX
    conversation = caller._conversation
    for now in (4.0, 8.0, 16.0):
        assert caller.turn(now) is None
    stranger.close()
    called, let_in = [], []
    until(lambda: not listener._queue, lambda: listener.turn(16.0))
    until(lambda: caller._answered, lambda: (caller.turn(16.0), listener.turn(16.0)))
    assert caller.deadline == 21.0  # the handshake timeout, from the first byte
    assert caller._conversation is conversation  # still the first attempt

    def turn() -> None:
        let_in.extend(listener.turn(17.0))
        if not called:
            called.extend(filter(None, [caller.turn(17.0)]))

    until(lambda: called and let_in, turn)
    opened += [called[0].stream, let_in[0].stream]


@pytest.mark.parametrize("addresses", [1, 2])
def test_server_that_stands_still_is_left_after_the_limit(
    addresses: int, opened: list[Any]
) -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(addresses)]
    opened += servers
    where = [endpoint(server.getsockname()) for server in servers]
    caller = make_caller((), False, endpoints=where, now=0.0, timeout_s=200.0)
    opened.append(caller)
    now, limits = 0.0, []
    for _ in range(2 * addresses):
        until(lambda: caller._conversation, lambda: caller.turn(now))  # noqa: B023
        limits.append(caller.deadline - now)
        now = caller.deadline
        caller.turn(now)
        if caller._again_at is not None:
            now = caller._again_at
    several = [5.0, 5.0, 10.0, 10.0]
    assert limits == pytest.approx(several if addresses > 1 else [SILENT_S_MAX] * 2)


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 0.1), (0.25, 0.15), (1.0, 0.3)])
def test_pause_between_rounds_is_chosen_by_chance(chance: float, pause: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, False, now=0.0, chance=lambda: chance)
    until(lambda: caller._again_at, lambda: caller.turn(0.0))
    assert caller.deadline == pytest.approx(pause)
    caller.close()


def test_pauses_of_two_callers_differ_and_leave_the_generator_of_the_program_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    callers = [make_caller(("127.0.0.1", 1), False, chance=None) for _ in range(2)]
    pauses = {caller._pause_s() for caller in callers for _ in range(5)}
    assert len(pauses) == 10
    assert all(0.1 <= pause <= 0.3 for pause in pauses)
    assert random.random() == expected
    for caller in callers:
        caller.close()


def test_a_refusal_is_final_once_all_addresses_were_tried(opened: list[Any]) -> None:
    listener = make_listener(False)
    opened.append(listener)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    endpoints = [endpoint(listener.address), endpoint(nobody)]
    caller = make_caller((), False, endpoints=endpoints, key=Secret(b"x" * 32))
    with pytest.raises(AuthError):
        meet(listener, caller)


def test_wait_needs_no_loop(opened: list[Any]) -> None:
    listener = make_listener(True)
    opened.append(listener)
    let_in = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            select.select([listener], [], [], 0.05)
            let_in.extend(listener.turn(time.monotonic()))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        opened.append(make_caller(listener.address, True).wait().stream)
    finally:
        stop.set()
        thread.join()
    opened.extend(one.stream for one in let_in)


def test_an_unreachable_address_ends_with_the_deadline() -> None:
    """A port that takes no connections because its backlog is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        where = server.getsockname()
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(where)
        caller = make_caller(where, False, now=0.0, timeout_s=3.0)
        assert caller.turn(0.0) is None
        assert caller.turn(2.0) is None
        with pytest.raises(ManagerLostError, match="no answer"):
            caller.turn(3.0)
        for sock in fill:
            sock.close()


def test_nothing_stays_open(opened: list[Any]) -> None:
    with pytest.raises(ValueError, match="no endpoints to call"):
        make_caller((), False, endpoints=[])
    caller = make_caller(("127.0.0.1", 1), False)
    caller.close()
    caller.close()
    listener = make_listener(True)
    opened.append(knock(listener))
    until(lambda: listener.strangers == 1, lambda: listener.turn(0.0))
    listener.close()
    opened[0].settimeout(5)
    assert opened[0].recv(1) == b""
    assert isinstance(endpoint(("127.0.0.1", 1)), Endpoint)
    assert certificate().sha256 != other_certificate().sha256


@pytest.mark.parametrize("leads", [True, False])
def test_a_manager_that_is_about_to_lead_is_asked_again(opened: list[Any], leads: bool) -> None:
    """For a while: then that it does not is the answer."""
    listener = make_listener(False)
    opened.append(listener)
    listener.not_now = frozenset({"node"})
    caller = make_caller(listener.address, False, now=0.0)
    clock, called = 0.0, []

    def turn() -> None:
        opened.extend(one.stream for one in listener.turn(clock))
        if not called:
            called.extend(filter(None, [caller.turn(clock)]))

    until(lambda: caller._again_at == pytest.approx(0.2), turn)
    clock = 6.0
    if leads:
        listener.not_now = frozenset()
        until(lambda: called, turn)
        opened.append(called[0].stream)
    else:
        with pytest.raises(ProtocolError, match="does not lead"):
            until(lambda: False, turn)
