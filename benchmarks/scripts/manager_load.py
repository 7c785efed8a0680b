"""Prints the manager's cost of many hosts: `manager_load.py storm|idle HOSTS SECONDS [plain]`.

storm: all hosts connect at the same time, over TLS; the time until the last one is connected.
idle: so many hosts are connected and only exchange heartbeats; the manager's CPU time.
plain: without TLS.

The manager is the shipped one in its own process: listener, TLS, planner, heartbeats. One process
has the client's half of all connections."""

import heapq
import json
import multiprocessing
import os
import resource
import select
import socket
import sys
import time
from pathlib import Path

from hoplite_mp._common.ids import random_host_id
from hoplite_mp._manager.heartbeats import Heartbeats
from hoplite_mp._manager.loop import ManagerLoop
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol.codec import BEAT, encode
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.membership import NodeJoined
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.listener import Listener
from hoplite_mp._transport.sockets import listen
from hoplite_mp._transport.tls import make_certificate
from hoplite_mp.config import Config

TLS = "plain" not in sys.argv
KEY, CLUSTER = Secret(b"k" * 32), b"c" * 16
TIMEOUT_S = 60.0
SETTLE_S = 3.0  # between the last join and the measurement


def cpu_seconds(pid):
    """Of all threads of the process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def serve(sock, own):
    """The manager's process."""
    config = Config()
    listener = Listener(
        sock,
        key=KEY,
        service="manager",
        cluster=CLUSTER,
        mine=Introduction(1, {}),
        certificate=make_certificate() if TLS else None,
        handshake_timeout_s=config.handshake_timeout_s,
        pending_handshakes_max=config.pending_handshakes_max,
    )
    loop = ManagerLoop(Planner())
    loop.add(own)
    loop.open(listener, b"", Heartbeats(config.heartbeat_interval_s, config.heartbeat_timeout_s))
    loop.run()


class Hosts:
    """The client's half of the connections of many hosts."""

    def __init__(self, where, count):
        self.poll = select.epoll()
        now = time.monotonic()
        self.callers = {}
        self.deadlines = []
        self.attempts = 0
        self.streams = {}
        self.failures = []
        self.last_at = now
        for number in range(count):
            caller = CountedCaller(where, number, now, self)
            self.callers[caller.fileno()] = caller
            self.poll.register(caller.fileno(), select.EPOLLIN)
        self.began = now

    def connect(self):
        """Calls until each host is connected or has failed. Returns the seconds."""
        for fd in list(self.callers):
            self._turn(fd, self.began)
        while self.callers:
            now = time.monotonic()
            wait = max(0.0, self.deadlines[0][0] - now) if self.deadlines else 1.0
            ready = [fd for fd, _ in self.poll.poll(min(wait, 1.0))]
            now = time.monotonic()
            while self.deadlines and self.deadlines[0][0] <= now:
                ready.append(heapq.heappop(self.deadlines)[1])
            for fd in ready:
                if fd in self.callers:
                    self._turn(fd, now)
        return self.last_at - self.began

    def _turn(self, fd, now):
        caller = self.callers[fd]
        try:
            admission = caller.turn(now)
        except (ConnectionError, OSError) as error:
            self.failures.append(str(error))
            del self.callers[fd]
            return
        if admission is None:
            if caller.deadline != caller.noted:
                caller.noted = caller.deadline
                heapq.heappush(self.deadlines, (caller.deadline, fd))
            return
        del self.callers[fd]
        self.last_at = time.monotonic()
        self.streams[admission.stream.fileno()] = admission.stream

    def join(self):
        for stream in self.streams.values():
            stream.write(encode(NodeJoined(random_host_id(), 1, 2)))
            stream.flush()
            self.poll.register(stream.fileno(), select.EPOLLIN)

    def beat(self, seconds, interval_s):
        """Sends heartbeats, one host after the other, and reads what arrives."""
        streams = list(self.streams.values())
        began, sent = time.monotonic(), 0
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) / interval_s * len(streams))
            for number in range(sent, due):
                stream = streams[number % len(streams)]
                stream.write(BEAT)
                stream.flush()
            sent = due
            for fd, _ in self.poll.poll(0.001):
                if self.streams[fd].read() is None:
                    raise ConnectionError("the manager has closed a connection")


class CountedCaller(Dialer):
    """A caller whose attempts are counted."""

    def __init__(self, where, number, now, hosts):
        super().__init__(
            [Endpoint(socket.AF_INET, where)],
            key=KEY,
            role="node",
            mine=Introduction(number + 2, {}),
            tls=TLS,
            now=now,
            timeout_s=TIMEOUT_S,
            handshake_timeout_s=Config().handshake_timeout_s,
        )
        self.noted = None
        self._hosts = hosts

    def _begin(self, now):
        self._hosts.attempts += 1
        super()._begin(now)


def main():
    kind, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = listen("127.0.0.1", [0])
    where = listener.getsockname()
    near, own = socket.socketpair()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, own))
    server.start()
    listener.close()
    near.sendall(encode(NodeJoined(random_host_id(), 1, 2)))
    before = cpu_seconds(server.pid)
    own_before = time.process_time()
    hosts = Hosts(where, count)
    result = {"seconds": hosts.connect()}
    result["server_cpu_seconds"] = cpu_seconds(server.pid) - before
    result["hosts_cpu_seconds"] = time.process_time() - own_before
    result["connected"] = len(hosts.streams)
    result["dropped"] = hosts.attempts - len(hosts.streams)
    if hosts.failures:
        result["failure"] = hosts.failures[0]
    if kind == "idle":
        interval_s = Config().heartbeat_interval_s
        hosts.join()
        hosts.beat(SETTLE_S, interval_s)
        before = cpu_seconds(server.pid)
        began = time.perf_counter()
        hosts.beat(seconds, interval_s)
        elapsed = time.perf_counter() - began
        result["cpu_percent"] = 100 * (cpu_seconds(server.pid) - before) / elapsed
    server.kill()
    server.join()
    print(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
