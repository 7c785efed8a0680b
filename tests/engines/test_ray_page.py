"""What docs/engines.md says of Ray, followed word for word on hosts with its addresses."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.engines.pages import blocks, environment, page_lan
from tests.engines.programs import Logs, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lan import Host, Lan

SHELL, PROGRAMS = blocks("Ray")
PATIENCE_S = 240.0
WAIT = """
import sys, time, ray
ray.init(address="auto", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < 3:
    time.sleep(0.1)
"""
COLLECTIVE = """
ray.init(address="auto", log_to_driver=False)
import hoplite_mp.integrations.ray as hoplite_ray
hoplite_ray.init(memory="200MiB")
workers = [Worker.options(num_cpus=0).remote(rank, 3) for rank in range(3)]
found = ray.get([one.step.remote(np.full(4, rank + 1.0)) for rank, one in enumerate(workers)])
print([one.tolist() for one in found])
hoplite_ray.shutdown()
"""


def test_the_page_has_these_blocks() -> None:
    assert [text.split()[:3] for text in SHELL] == [
        ["ray", "start", "--head"],
        ["ray", "start", "--address=192.168.1.10:6379"],
    ]
    assert len(PROGRAMS) == 2


@pytest.fixture
def lan() -> Iterator[Lan]:
    with page_lan(3) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_and_the_programs(lan: Lan, tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    env = {
        **environment(),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A busy machine's own processes are waited for longer than Ray does.
        "RAY_raylet_start_wait_time_s": "90",
        # Other hosts take the path of the first one's: there, each has a folder of its own.
        "RAY_TMPDIR": "/tmp",
    }
    for host in lan:
        own = host.root / "tmp" / "ray"
        script = f"mkdir -p {own} /tmp/ray && mount --bind {own} /tmp/ray"
        subprocess.run(host.enter("sh", "-c", script), check=True)

    def type_in(host: Host, command: str) -> subprocess.Popen[bytes]:
        return start(host, shlex.split(command), env, logs.of(f"ray-{host.name}"))

    def run(host: Host, text: str, name: str) -> str:
        (tmp_path / name).write_text(text)
        with open(logs.of(name), "wb") as log:
            done = host.run(
                [sys.executable, "-W", "ignore", str(tmp_path / name)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=PATIENCE_S,
            )
        assert done.returncode == 0, logs.said()
        return str(done.stdout)

    assert type_in(lan[0], SHELL[0]).wait(PATIENCE_S) == 0, logs.said()
    starts = [type_in(host, SHELL[1]) for host in (lan[1], lan[2])]
    assert [one.wait(PATIENCE_S) for one in starts] == [0, 0], logs.said()
    # Ray does not wait for nodes: a program that begins before they are there has none.
    run(lan[1], WAIT, "wait.py")
    hosts, *total = run(lan[1], PROGRAMS[0], "program.py").splitlines()
    assert sorted(hosts.strip("[]").replace("'", "").split(", ")) == ["h1", "h2", "h3"]
    assert " ".join(total) == "[" + " ".join(["100000."] * 8) + "] (0, 1, 2, 3)"
    assert run(lan[2], PROGRAMS[1] + COLLECTIVE, "collective.py") == f"{[[6.0] * 4] * 3}\n"
