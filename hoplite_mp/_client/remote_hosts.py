"""Starts nodes on other hosts: `Cluster(hosts=[...])`, by default over the system's ssh.

Nobody should need a second terminal. For each host this process runs Config.hosts_command once,
which runs `hoplite-mp join` there. The token is sent through the command's standard input, never as
an argument. The end of that input ends the node, so a broken connection leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp._common import clock
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RemoteHosts", "checked_hosts"]

POLL_S = 0.05
END_PATIENCE_S = 5.0  # for processes that end by themselves when the cluster does
ERROR_BYTES_MAX = 4096  # how much of a host's error output is shown


class RemoteHosts:
    """The processes that run Config.hosts_command, one for each host."""

    def __init__(self, addresses: dict[str, str], command: str, token: str, tls: bool) -> None:
        """addresses: for each host, the address that it joins. ConfigError: the command cannot be
        run."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._said: dict[str, IO[bytes]] = {}
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
        except ValueError as error:  # a quotation that does not end
            raise ConfigError(f"hosts_command={template!r} is not allowed: {error}") from error
        for word in split:
            words += arguments if word == "{arguments}" else [word.replace("{host}", host)]
        said = self._said[host] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                # Ctrl-C must reach only the program, which then ends these processes in order.
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"hosts_command={template!r} cannot be run: {error}") from error
        self.processes[host] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `wait` reports why
            process.stdin.write(token.encode("utf-8", "surrogatepass") + b"\n")
            process.stdin.flush()

    def wait(self, joined: Callable[[], int], timeout_s: float) -> None:
        """Waits until all these nodes have joined. NodeLostError: one could not, or not in time."""
        deadline = clock.monotonic() + timeout_s
        while joined() < len(self.processes):
            for host, process in self.processes.items():
                if process.poll() is not None:
                    raise errors.NodeLostError(
                        f"no node could be started on {host!r} (exit code {process.returncode}): "
                        f"{self._last_words(host)}"
                    )
            if clock.monotonic() > deadline:
                there = ", ".join(map(repr, self.processes))
                raise errors.NodeLostError(
                    f"{joined()} of {len(self.processes)} nodes joined within {timeout_s:g} s "
                    f"(Config.hosts_wait_s); hosts: {there}"
                )
            clock.sleep(POLL_S)

    def _last_words(self, host: str) -> str:
        said = self._said[host]
        said.seek(0, 2)
        said.seek(max(0, said.tell() - ERROR_BYTES_MAX))
        text = said.read().decode(errors="replace").strip()
        return text or "it said nothing"

    def end(self) -> None:
        """Called after the end of the cluster, which also ends these processes; kills those that
        have not ended within END_PATIENCE_S."""
        for process in self.processes.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        deadline = clock.monotonic() + END_PATIENCE_S
        for process in self.processes.values():
            if clock.wait_for_process(process, max(0.0, deadline - clock.monotonic())) is None:
                process.kill()
                process.wait()
        for said in self._said.values():
            said.close()
        self.processes, self._said = {}, {}


def checked_hosts(hosts: Any) -> list[str]:
    """The names as a list; ValueError if they are not valid."""
    given = hosts if isinstance(hosts, Iterable) and not isinstance(hosts, str) else [None]
    # What begins with "-" would be an option of the command that reaches the host.
    if not all(isinstance(host, str) and host and host[0] != "-" for host in given):
        raise ValueError(f'hosts={hosts!r}: it must be a list of names, such as ["a", "user@b"]')
    if len(set(hosts)) != len(list(hosts)):
        raise ValueError(f"hosts={hosts!r}: a host is named twice")
    return list(hosts)
