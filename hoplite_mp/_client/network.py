"""A host's network settings (token, sockets, certificate), and nodes started over ssh.

Errors in an address, a port or a token are detected and raised in the user's process. Other
processes receive descriptors and values, but no names to resolve.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp._common import clock
from hoplite_mp._protocol.local import LanStart
from hoplite_mp._transport.addresses import (
    Address,
    advertised_addresses,
    own_addresses,
    parse_address,
    parse_ports,
    resolve,
    routed_address,
)
from hoplite_mp._transport.sockets import bound_address, listen
from hoplite_mp._transport.tokens import load_token
from hoplite_mp.errors import ConfigError, ManagerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hoplite_mp._transport.addresses import Endpoint
    from hoplite_mp.config import Config

__all__ = ["HostNetwork", "RemoteHosts", "checked_hosts"]


CLUSTER_BYTES = 16
_log = logging.getLogger("hoplite_mp")


class HostNetwork:
    """The listening sockets and secrets of one host, before they are passed to its processes."""

    def __init__(
        self,
        config: Config,
        *,
        listen_at: str | None,
        address: str | None,
        ports: Any,
        token: str | Path | None,
        tls: bool | None,
        stays: bool = False,
        standby: Sequence[str] = (),
    ) -> None:
        """standby: with listen_at, the address of the standby; with address, further addresses of
        the manager. stays: whether this process exists only for its node, so that drivers on this
        host may attach to the node. Raises AuthError or ConfigError if an argument is wrong."""
        if (listen_at is None) == (address is None):
            raise ConfigError("listen= starts a cluster, address= joins one: pass only one of them")
        self.config = config
        self.tls = tls is not False
        self.stays = stays or listen_at is not None
        self.sockets: list[socket.socket] = []
        self.manager: list[Endpoint] = []
        self._manager_socket: socket.socket | None = None
        self._wanted = _ports(ports)
        self.standby: list[Endpoint] = []
        try:
            for other in standby:
                self._add_standby(parse_address(other))
            if listen_at is not None:
                self._listen(parse_address(listen_at))
                # Last, so that no token is created if listening fails.
                self.token = load_token(token, make=True)
            else:
                assert address is not None
                where = parse_address(address)
                # Errors in this host's settings are reported before another host is contacted.
                self.token = load_token(token)
                self._find(where)
        except BaseException:
            self.close()
            raise
        if not self.tls:
            _log.warning(
                "tls=False: all data is sent unencrypted, and anybody on the network path can read "
                "and change it; processes without the token still cannot join the cluster"
            )

    def _listen(self, where: Address) -> None:
        self._manager_socket = self._open(where.host, range(where.port, where.port + 1))
        peers = self._open(where.host, self._wanted)
        port = bound_address(self._manager_socket).port
        hosts = advertised_addresses(bound_address(self._manager_socket).host, None)
        self.address = str(Address(hosts[0], port))
        self.addresses = [str(Address(host, bound_address(peers).port)) for host in hosts]
        for end in self.standby:
            self._check_elsewhere(end)

    @staticmethod
    def _check_elsewhere(standby: Endpoint) -> None:
        host = ipaddress.ip_address(standby.sockaddr[0].partition("%")[0])
        if host.is_unspecified or host.is_loopback or str(host) in own_addresses():
            raise ConfigError(
                f"the standby at {host}: pass an address of another host that all hosts can reach; "
                "this host runs the manager"
            )

    def _add_standby(self, where: Address) -> None:
        try:
            self.standby += resolve(where)
        except OSError as error:
            raise ConfigError(f"the standby at {where}: {error}") from error

    def _find(self, where: Address) -> None:
        self.address = str(where)
        try:
            self.manager = [*resolve(where), *self.standby]
        except OSError as error:
            raise ManagerLostError(f"{where}: {error.strerror or error}") from error
        routed = routed_address(self.manager[0])
        if routed is None:
            raise ManagerLostError(f"there is no route from this host to {where}")
        self._routed = routed

    def open(self) -> None:
        """Listens for the other nodes in the cluster. Called if this host joins with a new node.
        Raises ConfigError if no port is free."""
        peers = self._open(self._routed, self._wanted)
        self.addresses = [str(Address(self._routed, bound_address(peers).port))]

    def address_for(self, host: str) -> str:
        """The address at which that host can join: this host's address on the route to `host` if
        its name can be resolved here; otherwise the first advertised address."""
        name = host.rpartition("@")[2]
        own = parse_address(self.address)
        try:
            routed = routed_address(resolve(Address(name, own.port))[0])
        except (OSError, ValueError):
            routed = None
        return self.address if routed is None else str(Address(routed, own.port))

    def _open(self, host: str, ports: range) -> socket.socket:
        sock = listen(host, ports)
        self.sockets.append(sock)
        return sock

    def start(self, host_id: int) -> LanStart:
        """The message that configures this host's processes."""
        certificate = b""
        if self.tls and self._manager_socket is not None:
            from hoplite_mp._transport.certificates import make_certificate

            certificate = make_certificate().pem
        return LanStart(
            key=self.token.key,
            host_id=host_id,
            host=socket.gethostname(),
            peer_fd=self.sockets[-1].fileno(),
            addresses=self.addresses,
            ports=(self._wanted.start, self._wanted.stop, self._wanted.step),
            handshake_timeout_s=self.config.handshake_timeout_s,
            pending_handshakes_max=self.config.pending_handshakes_max,
            connect_timeout_s=self.config.connect_timeout_s,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            tls=self.tls,
            manager_fd=-1 if self._manager_socket is None else self._manager_socket.fileno(),
            cluster=b"" if self._manager_socket is None else secrets.token_bytes(CLUSTER_BYTES),
            certificate=certificate,
            standby=[str(end) for end in self.standby] if self._manager_socket else [],
            accepts_drivers=self.stays,
            manager=[(int(end.family), tuple(end.sockaddr)) for end in self.manager],
        )

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the sockets that the host's processes take over."""
        return [sock.fileno() for sock in self.sockets]

    def close(self) -> None:
        """Closes the sockets in this process, which no longer needs them."""
        for sock in self.sockets:
            sock.close()


def _ports(ports: Any) -> range:
    if ports is None:
        return range(1)  # any free port
    if isinstance(ports, range):
        return ports
    return parse_ports(str(ports))


# Starts nodes on other hosts: `Cluster(hosts=[...])`, by default over the system's ssh.
#
# For each host, this process runs Config.hosts_command once. The command runs `hoplite-mp join` on
# the host. The token is sent through the command's standard input, never as an argument. The node
# shuts down at the end of this input, so a broken connection leaves no process behind.


POLL_S = 0.05
END_PATIENCE_S = 5.0  # how long processes may take to exit after the cluster has stopped
ERROR_BYTES_MAX = 4096  # how much of a host's error output is shown


class RemoteHosts:
    """The processes that run Config.hosts_command, one for each host. Each reads the token from its
    standard input, and its node shuts down at the end of that input."""

    def __init__(self, addresses: dict[str, str], command: str, token: str, tls: bool) -> None:
        """addresses: host -> the address at which it joins. Raises ConfigError if the command
        cannot be run."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stderr: dict[str, IO[bytes]] = {}
        try:
            for host, address in addresses.items():
                arguments = ["join", address, "--token-file", "-"]
                self._begin(host, command, arguments + ["--no-tls"] * (not tls), token)
        except BaseException:
            self.end()
            raise

    def _begin(self, host: str, template: str, arguments: list[str], token: str) -> None:
        words = []
        try:
            split = shlex.split(template)
        except ValueError as error:  # an unclosed quotation
            raise ConfigError(f"hosts_command={template!r} is not allowed: {error}") from error
        for word in split:
            words += arguments if word == "{arguments}" else [word.replace("{host}", host)]
        stderr = self._stderr[host] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                # Ctrl-C must reach only the program, which then stops these processes in order.
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"hosts_command={template!r} cannot be run: {error}") from error
        self.processes[host] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited; `wait` reports why
            process.stdin.write(token.encode("utf-8", "surrogatepass") + b"\n")
            process.stdin.flush()

    def wait(self, joined: Callable[[], int], timeout_s: float) -> None:
        """Waits until all these nodes have joined. Raises NodeLostError if a node could not join,
        or did not join in time."""
        deadline = clock.monotonic() + timeout_s
        while joined() < len(self.processes):
            for host, process in self.processes.items():
                if process.poll() is not None:
                    raise errors.NodeLostError(
                        f"no node could be started on {host!r} (exit code {process.returncode}): "
                        f"{self._error_output(host)}"
                    )
            if clock.monotonic() > deadline:
                hosts = ", ".join(map(repr, self.processes))
                raise errors.NodeLostError(
                    f"{joined()} of {len(self.processes)} nodes joined within {timeout_s:g} s "
                    f"(Config.hosts_wait_s); hosts: {hosts}"
                )
            clock.sleep(POLL_S)

    def _error_output(self, host: str) -> str:
        stderr = self._stderr[host]
        stderr.seek(0, 2)
        stderr.seek(max(0, stderr.tell() - ERROR_BYTES_MAX))
        text = stderr.read().decode(errors="replace").strip()
        return text or "no error output"

    def end(self) -> None:
        """Called after the cluster has stopped, which normally makes these processes exit. Kills
        those that have not exited within END_PATIENCE_S."""
        for process in self.processes.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        deadline = clock.monotonic() + END_PATIENCE_S
        for process in self.processes.values():
            if clock.wait_for_process(process, max(0.0, deadline - clock.monotonic())) is None:
                process.kill()
                process.wait()
        for stderr in self._stderr.values():
            stderr.close()
        self.processes, self._stderr = {}, {}


def checked_hosts(hosts: Any) -> list[str]:
    """The names as a list. Raises ValueError if a name is invalid or occurs twice."""
    given = hosts if isinstance(hosts, Iterable) and not isinstance(hosts, str) else [None]
    # The command that connects to the host would treat a name that begins with "-" as an option.
    if not all(isinstance(host, str) and host and host[0] != "-" for host in given):
        raise ValueError(f'hosts={hosts!r}: it must be a list of names, such as ["a", "user@b"]')
    if len(set(hosts)) != len(list(hosts)):
        raise ValueError(f"hosts={hosts!r}: a host occurs twice")
    return list(hosts)
