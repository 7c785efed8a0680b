"""A LAN on one machine: hosts that share nothing but a switch with limited links.

What several hosts do to each other can only be tested with several hosts. Each one here is a set of
namespaces (network, UTS, PID, IPC, mount) with private /dev/shm and /run, and directories of its
own for what programs leave behind. Its link to the switch is shaped in both directions, can be
changed while it is used, and cut. Killing the first process of a host kills the host. Everything
hangs on pipes to this process: when it ends, however it does, the hosts end too.

Boot id, machine id, kernel and clock are the same on all hosts. Needs root, util-linux, iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lan import forked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["DEVICE", "UNLIMITED", "Host", "Lan", "why_not"]

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
BURST, LIMIT = "128kb", "4mb"  # of the token buckets: 119.7 MB/s of 1 Gbit/s arrive
UNLIMITED = "unlimited"
DEVICE = "eth0"  # of each host, to the switch
PATIENCE_S = 30.0
SHM_BYTES = 1 << 30
# What every program on the hosts finds in its environment, unless it is given something else.
settings: dict[str, str] = {}

# The first process of a host: mounts what is private, says that it is there, then only reads.
FIRST = """
mount -t tmpfs -o size={shm} tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs /run &&
hostname {name} && ip link set lo up && echo ready && exec cat
"""
NAMESPACES = ("--uts", "--mount", "--pid", "--ipc", "--net")


def why_not() -> str | None:
    """Why there can be no LAN on this machine; None if there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian, Ubuntu: apt install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tried = subprocess.run(
        [
            "unshare",
            *NAMESPACES,
            "--fork",
            "ip",
            "link",
            "add",
            "name",
            "switch0",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else None


def _mac(number: int) -> str:
    """The Ethernet address of that host, also of a dead one's successor."""
    return f"02:77:00:00:00:{number:02x}"


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _first_child(pid: int) -> int:
    """The one child of a process of ours, as soon as it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        time.sleep(0.001)
    raise TimeoutError(f"process {pid} has no child")


@dataclass
class Host:
    """One emulated host."""

    lan: Lan
    number: int  # 1, 2, ...
    root: Path  # its directories
    outer: subprocess.Popen[str]  # unshare; its end takes the host along
    pid: int  # the host's first process, as seen from here
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"h{self.number}"

    @property
    def address(self) -> str:
        """Its IPv4 address on the LAN."""
        return f"10.77.0.{self.number}"

    @property
    def address6(self) -> str:
        """Its IPv6 address on the LAN."""
        return f"fd77::{self.number}"

    def enter(self, *command: str) -> list[str]:
        """The command as it is to be given to this machine, to run on the host."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--", *command]

    def environment(self, **more: str) -> dict[str, str]:
        """This process's environment, but with places of the host's own."""
        places = {"HOME": "home", "TMPDIR": "tmp"}
        places |= {
            "XDG_CONFIG_HOME": "home/.config",
            "XDG_CACHE_HOME": "home/.cache",
            "XDG_DATA_HOME": "home/.local/share",
        }
        places["XDG_RUNTIME_DIR"] = "runtime"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "HOPLITE_MP_"))}
        own = {name: str(self.root / place) for name, place in places.items()}
        return kept | own | settings | more

    def popen(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A program on this host. Signals to it: `kill`, by the pid inside."""
        options.setdefault("stdin", subprocess.DEVNULL)
        process = self._start(command, self.environment(**(env or {})), **options)
        self.processes.append(process)
        return process

    def _start(
        self, command: Sequence[str], env: dict[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        if forked.made is not None and forked.made.can_run(command, env, options):
            return forked.made.start(self.pid, command, env, **options)
        return subprocess.Popen(self.enter(*command), env=env, **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """A program on this host, to its end."""
        options.setdefault("stdin", subprocess.DEVNULL)
        timeout = options.pop("timeout", None)
        env = self.environment(**options.pop("env", {}))
        if options.pop("capture_output", False):
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        given = options.pop("input", None)
        if given is not None:
            options["stdin"] = subprocess.PIPE
        with self._start(command, env, **options) as process:
            try:
                out, err = process.communicate(given, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def signal(self, process: subprocess.Popen[Any], number: int) -> None:
        """A signal to the program itself, not to what has entered the host for it."""
        os.kill(_first_child(process.pid), number)

    def kill(self) -> None:
        """The host dies: all its processes, SIGKILL, at once. Its link goes with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.outer.communicate(timeout=PATIENCE_S)
        for process in self.processes:
            process.wait(PATIENCE_S)
        self.lan.hosts = [host for host in self.lan.hosts if host is not self]

    def shape(self, up: str | None = None, down: str | None = None) -> None:
        """New rates as tc writes them ("1gbit"); UNLIMITED for none, None for as it is."""
        for rate, prefix, device in (
            (up, self.enter(), DEVICE),
            (down, self.lan.enter(), f"port{self.number}"),
        ):
            if rate == UNLIMITED:
                with contextlib.suppress(OSError):
                    _run(*prefix, "tc", "qdisc", "del", "dev", device, "root")
            elif rate is not None:
                bucket = ("tbf", "rate", rate, "burst", BURST, "limit", LIMIT)
                _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *bucket)

    def narrow(self, other: Host, rate: str) -> None:
        """What comes from that host (IPv4) is limited to this rate on its way, as by a slower
        switch in between; what comes from others by the link alone, as before. Until the next
        shape(down=...)."""
        port = f"port{self.number}"
        tc = (*self.lan.enter(), "tc")
        if self.lan.rate == UNLIMITED:
            raise ValueError("a path can only be narrower than a link that is limited")
        link = ("htb", "rate", self.lan.rate, "burst", BURST, "quantum", "65536")
        path = ("htb", "rate", rate, "burst", BURST, "quantum", "65536")
        if "htb 1:" not in _run(*tc, "qdisc", "show", "dev", port):
            tree = ("root", "handle", "1:", "htb", "default", "1")
            _run(*tc, "qdisc", "replace", "dev", port, *tree)
            _run(*tc, "class", "add", "dev", port, "parent", "1:", "classid", "1:ff", *link)
            self._leaf(port, "1:1", link)
        leaf = f"1:{other.number + 1:x}"
        self._leaf(port, leaf, path)
        match = ("u32", "match", "ip", "src", f"{other.address}/32", "flowid", leaf)
        _run(*tc, "filter", "add", "dev", port, "parent", "1:", "protocol", "ip", *match)

    def came_from(self, other: Host) -> int:
        """Bytes that have come over the path that `narrow` has made."""
        text = _run(*self.lan.enter(), "tc", "-s", "class", "show", "dev", f"port{self.number}")
        leaf = f"class htb 1:{other.number + 1:x} "
        (found,) = [part for part in text.split("\n\n") if part.strip().startswith(leaf)]
        return int(found.split(" Sent ")[1].split()[0])

    def _leaf(self, port: str, name: str, limit: tuple[str, ...]) -> None:
        tc = (*self.lan.enter(), "tc")
        _run(*tc, "class", "add", "dev", port, "parent", "1:ff", "classid", name, *limit)
        _run(*tc, "qdisc", "add", "dev", port, "parent", name, "bfifo", "limit", LIMIT)

    def cut(self) -> None:
        """Nothing arrives or leaves any more, and nobody is told."""
        _run(*self.lan.enter(), "ip", "link", "set", f"port{self.number}", "nomaster")

    def mend(self) -> None:
        """The opposite of cut()."""
        _run(*self.lan.enter(), "ip", "link", "set", f"port{self.number}", "master", "switch")

    def separate(self, other: Host, how: str = "unreachable") -> None:
        """No packet goes from this host to that one. how: "unreachable": who sends is told at once;
        "blackhole" of the other side: silence."""
        _run(*self.enter("ip", "route", "add", how, f"{other.address}/32"))
        _run(*self.enter("ip", "-6", "route", "add", how, f"{other.address6}/128"))


class Lan:
    """`size` hosts on one switch, as a context manager. rate: of each link, each way."""

    def __init__(self, size: int, rate: str = UNLIMITED) -> None:
        self.size = size
        self.rate = rate
        self.hosts: list[Host] = []

    def __enter__(self) -> Lan:
        with contextlib.ExitStack() as stack:
            self.root = Path(tempfile.mkdtemp(prefix="hoplite_lan_"))
            stack.callback(shutil.rmtree, self.root, ignore_errors=True)
            self._switch = self._start("echo ready; exec cat", "--net")
            stack.callback(self._end, self._switch)
            self._switch_pid = _first_child(self._switch.pid)
            _run(*self.enter(), "ip", "link", "add", "switch", "type", "bridge")
            _run(*self.enter(), "ip", "link", "set", "switch", "up")
            stack.callback(self._kill_all)
            for number in range(1, self.size + 1):
                self.add(number)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def enter(self, *command: str) -> list[str]:
        """The command as it runs at the switch."""
        return ["nsenter", f"--target={self._switch_pid}", "--net", "--", *command]

    def add(self, number: int) -> Host:
        """A host more, or a dead one's successor at the same address."""
        root = self.root / f"h{number}"
        for place in ("home", "tmp", "runtime"):
            (root / place).mkdir(parents=True, exist_ok=True)
        (root / "runtime").chmod(0o700)
        script = FIRST.format(shm=SHM_BYTES, name=f"h{number}")
        outer = self._start(script, *NAMESPACES, "--kill-child", "--mount-proc")
        host = Host(self, number, root, outer, _first_child(outer.pid))
        self.hosts.append(host)
        self.hosts.sort(key=lambda host: host.number)
        port = f"port{number}"
        with contextlib.suppress(OSError):  # of a host that has died: the kernel takes its time
            _run(*self.enter(), "ip", "link", "del", port)
        _run(
            *self.enter(), "ip", "link", "add", port, "type", "veth",
            "peer", "name", DEVICE, "address", _mac(number), "netns", str(host.pid),
        )  # fmt: skip
        _run(*self.enter(), "ip", "link", "set", port, "master", "switch", "up")
        _run(*host.enter("ip", "address", "add", f"{host.address}/24", "dev", DEVICE))
        _run(
            *host.enter("ip", "-6", "address", "add", f"{host.address6}/64", "dev", DEVICE, "nodad")
        )
        _run(*host.enter("ip", "link", "set", DEVICE, "up"))
        self._introduce(host)
        host.shape(self.rate, self.rate)
        return host

    def _introduce(self, host: Host) -> None:
        """Writes down the Ethernet addresses of the other hosts. Those that the kernel finds by
        itself count against net.ipv4.neigh.default.gc_thresh3, which is one for all namespaces:
        64 hosts that all talk to each other are more than its 1024."""
        lines = [
            f"neighbour replace {address} lladdr {_mac(number)} dev {DEVICE} nud permanent"
            for number in range(1, max(self.size, host.number) + 1)
            if number != host.number
            for address in (f"10.77.0.{number}", f"fd77::{number}")
        ]
        _run(*host.enter("ip", "-batch", "-"), text="\n".join(lines))

    def _start(self, script: str, *options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["unshare", *options, "--fork", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # killed, unshare complains about its signal mask
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(f"a host did not start: {process.communicate()[1]}")
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.communicate("")  # the end of its input is its end

    def _kill_all(self) -> None:
        for host in list(self.hosts):
            host.kill()
