"""In a memory control group: its limit is the default's measure, and nothing is ever OOM-killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.values import MIB
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A fresh group below the one that this process is in."""

    def __init__(self, folder: Path, limit_file: str, oom_file: str) -> None:
        self.folder, self.limit_file, self.oom_file = folder, limit_file, oom_file

    def limit(self, nbytes: int) -> None:
        (self.folder / self.limit_file).write_text(str(nbytes))

    def oom_kills(self) -> int:
        for line in (self.folder / self.oom_file).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def run(self, code: str) -> str:
        """The output of a Python process that lives in the group."""
        script = f'echo $$ > {self.folder}/cgroup.procs && exec {sys.executable} -c "$CODE"'
        done = subprocess.run(
            ["sh", "-c", script],
            env={**os.environ, "CODE": textwrap.dedent(code)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def group() -> Iterator[Group]:
    name = f"hoplite_mp-{uuid.uuid4().hex}"
    if (V1 / "memory.limit_in_bytes").exists():
        made = Group(V1 / name, "memory.limit_in_bytes", "memory.oom_control")
    elif "memory" in _read(V2 / "cgroup.subtree_control"):
        made = Group(V2 / name, "memory.max", "memory.events")
    else:
        pytest.skip("no memory control group may be made here")
    try:
        made.folder.mkdir()
        made.limit(1 << 30)
    except OSError as error:
        if made.folder.exists():
            made.folder.rmdir()
        pytest.skip(f"no memory control group may be made here: {error}")
    yield made
    eventually(lambda: not _read(made.folder / "cgroup.procs"), "the end of its processes")
    made.folder.rmdir()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_the_default_limit_is_a_third_of_the_groups(group: Group) -> None:
    group.limit(768 * MIB)
    out = group.run("""
        import hoplite_mp
        with hoplite_mp.Cluster(workers=1) as c:
            print(c.stats()["bytes_limit"], c.submit(len, [1, 2]).result())
    """)
    limit, result = map(int, out.split())
    assert result == 2
    assert limit == 256 * MIB


@pytest.mark.parametrize("where", ["driver", "workers"])
def test_more_than_the_group_allows(group: Group, where: str) -> None:
    """memory= promises more than there is: what does not fit spills, or is refused, in time."""
    group.limit(512 * MIB)
    out = group.run(f"""
        import numpy as np, hoplite_mp
        from hoplite_mp import Config, StoreFullError
        def made(n):
            array = hoplite_mp.current().empty(32 << 20, np.uint8)
            array[:] = n
            return array
        config = Config(put_wait_s=0.5)
        with hoplite_mp.Cluster(workers=2, memory="2GiB", config=config) as c:
            refs, arrays, full = [], [], 0
            for n in range(30):
                try:
                    ref = c.put(made(n)) if {where!r} == "driver" else c.submit(made, n)
                    array = c.get(ref)
                    assert array[0] == array[-1] == n
                    arrays.append(array)
                except StoreFullError as error:
                    assert "available" in str(error) or "pinned" in str(error), error
                    full += 1
                    if full == 2:
                        break
            print(len(arrays), full, c.stats()["workers_lost"])
            del arrays, array
            ref = None
            print(c.get(c.submit(made, 7))[5])
    """)
    count, full, lost, value = map(int, out.split())
    assert full == 2
    assert 2 <= count < 16
    assert lost == 0
    assert value == 7
    assert group.oom_kills() == 0


def test_a_small_group_still_works(group: Group) -> None:
    """The reserve that is left to others is not all there is."""
    group.limit(300 * MIB)
    out = group.run("""
        import numpy as np, hoplite_mp
        with hoplite_mp.Cluster(workers=1) as c:
            refs = [c.put(np.full(1 << 20, n, np.uint8)) for n in range(150)]
            print(sum(int(c.get(ref)[9]) for ref in refs), c.submit(abs, -4).result())
    """)
    assert out.split() == [str(sum(range(150))), "4"]
    assert group.oom_kills() == 0
