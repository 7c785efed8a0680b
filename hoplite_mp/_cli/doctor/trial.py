"""Trials: starting a cluster on this host, and joining a running one.

Some problems appear only when processes start, tasks run and data is transferred. A trial runs in a
separate process, which prints each step before the step begins, and each finding. So a hanging
trial can be killed, a crash does not stop the command, and in both cases the failing step is
known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import ApartCluster, Cluster, current
from hoplite_mp._cli.doctor.findings import Finding, ok, problem, warning
from hoplite_mp._cli.doctor.network import shown
from hoplite_mp._client.launch import interpreter
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._common.ref import by_ref
from hoplite_mp._supervisor.environment import blas_threads_here
from hoplite_mp._transport.tokens import FILE_VARIABLE, VARIABLE
from hoplite_mp.config import MIB
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._cli.doctor.findings import Check

__all__ = ["trial_of_cluster", "trial_of_host"]

# Timeout of a trial. Higher: loaded hosts pass. Lower: a hanging trial is reported sooner.
TRIAL_S_MAX = 45.0
STEP_S_MAX = 30.0  # timeout of a wait inside a trial
AFTER_KILL_S = 5.0
ANSWER_S_MAX = 8.0  # timeout for the answers of all nodes; each attempt may take two seconds
WORKERS = 2
OBJECT_BYTES = 64 * MIB
STORE_PART = 4  # the object takes at most 1 / STORE_PART of the store
CALLS, CALLS_REMOTE = 200, 20
# Limits for warnings, far from the values on an idle host (60 us for a call; 14 ms for 64 MiB).
CALL_SLOW_S = 5e-3
PUT_SLOW_BYTES_PER_S = 0.3e9


def trial_of_host() -> Check:
    """A check that starts two workers, runs tasks, stores an array, and reads it in another
    process."""

    def trial() -> Iterator[Finding]:
        return _watched(["host"], dict(os.environ), "trial")

    return trial


def trial_of_cluster(address: str, token_file: Path | None, tls: bool) -> Check:
    """A check that joins without workers, queries all nodes, and runs tasks on each node with
    workers."""
    environment = dict(os.environ)
    if token_file is not None:  # passed in the environment, where VARIABLE takes precedence
        environment.pop(VARIABLE, None)
        environment[FILE_VARIABLE] = str(token_file)

    def trial() -> Iterator[Finding]:
        return _watched(["cluster", address, "tls" if tls else "plain"], environment, "nodes")

    return trial


def _watched(arguments: list[str], environment: dict[str, str], subject: str) -> Iterator[Finding]:
    """Runs the trial, and yields its findings. If the trial hangs or fails, also yields a problem
    that names the step."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [interpreter(), "-m", "hoplite_mp._cli.doctor.trial", *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    late = False
    try:
        out, errors = process.communicate(timeout=TRIAL_S_MAX)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        out = errors = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, errors = process.communicate(timeout=AFTER_KILL_S)
    except BaseException:
        process.kill()
        raise
    step = "starting python"
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # lines printed by libraries
            report = json.loads(line)
            step = report.get("step", step)
            if "level" in report:
                yield Finding(**report)
    if late:
        observed = f"hung while {step}, and was killed after {TRIAL_S_MAX:g} s"
        yield problem(subject, observed, "is the host overloaded? If not, please report it")
    elif process.returncode:
        last = (errors.strip().splitlines() or ["no error output"])[-1]
        yield problem(subject, f"failed while {step}: {_ending(process.returncode)}{last}")


def _ending(code: int) -> str:
    return f"{signal.Signals(-code).name}: " if code < 0 else ""


# -- in the trial's process ------------------------------------------------------------------------


def _print(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _report(finding: Finding) -> None:
    _print(**dataclasses.asdict(finding))


def _pid(_: int = 0) -> int:
    return os.getpid()


def _threads(_: int = 0) -> tuple[int | None, str]:
    """The number of threads that OpenBLAS uses in this process, and the number for other
    libraries."""
    return blas_threads_here(), os.environ["OMP_NUM_THREADS"]


def _get_and_read(ref: Any) -> tuple[int, float, int]:
    """Gets the array. Returns the pid of this process, the duration of `get` in seconds, and the
    xor of all words."""
    began = time.perf_counter()
    array = current().get(ref)
    seconds = time.perf_counter() - began
    return os.getpid(), seconds, int(np.bitwise_xor.reduce(array))


def _calls(submit: Callable[..., Any], count: int) -> float:
    """The median time in seconds between submitting a task and its result."""
    times = []
    for number in range(count):
        began = time.perf_counter()
        submit(_pid, number).result(STEP_S_MAX)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _host() -> None:
    _print(step="starting two workers")
    began = time.perf_counter()
    with Cluster(workers=WORKERS) as cluster:
        if cluster.submit(_pid).result(STEP_S_MAX) == os.getpid():
            raise RuntimeError("a task ran in the process that submitted it")
        _report(ok("start", f"two workers: the first result after {shown(_since(began))}"))
        _print(step="running tasks")
        call = _calls(cluster.submit, CALLS)
        observed = f"round trip in {shown(call)} (median of {CALLS})"
        if call > CALL_SLOW_S:
            _report(warning("tasks", observed, "slow: is the host busy?"))
        else:
            _report(ok("tasks", observed))
        _print(step="counting threads")
        blas, others = cluster.submit(_threads).result(STEP_S_MAX)
        measured = others if blas is None else f"{blas} (BLAS), {others} (others)"
        _report(ok("threads", f"in each of {WORKERS} workers: {measured}"))
        _objects(cluster)
        _print(step="ending the cluster")


def _objects(cluster: Cluster) -> None:
    store = cluster.nodes[0].memory_total
    nbytes = min(OBJECT_BYTES, store // STORE_PART)
    array = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(2654435761)
    wanted, size = int(np.bitwise_xor.reduce(array)), format_bytes(nbytes)
    _print(step=f"storing {size}")
    times = []
    for _ in range(4):  # the first put must get memory from the system, and is not counted
        ref = None  # lets the next put reuse the memory of the previous object
        began = time.perf_counter()
        ref = cluster.put(array)
        times.append(_since(began))
    put = statistics.median(times[1:])
    _print(step=f"reading {size} in another process")
    pid, get, found = cluster.submit(_get_and_read, by_ref(ref)).result(STEP_S_MAX)
    if pid == os.getpid() or found != wanted:
        observed = f"the bytes read differ from the {size} stored"
        _report(problem("objects", observed, "please report it"))
        return
    observed = (
        f"{size} stored at {nbytes / put / 1e9:.1f} GB/s, read correctly by another process in "
        f"{shown(get)} without a copy"
    )
    if nbytes / put < PUT_SLOW_BYTES_PER_S:
        _report(warning("objects", observed, "slow: is memory short, or the host busy?"))
    else:
        _report(ok("objects", observed))


def _cluster(address: str, tls: bool) -> None:
    _print(step=f"joining {address}")
    began = time.perf_counter()
    with ApartCluster(workers=0, address=address, tls=None if tls else False) as cluster:
        joined = _since(began)
        own = f"h{cluster._runtime.tasks.node_number}"
        _print(step="querying all nodes")
        deadline = time.monotonic() + ANSWER_S_MAX
        while True:
            answered = set(cluster.stats()["nodes"])
            nodes = [node for node in cluster.nodes if node.id != own]
            silent = [node for node in nodes if node.id not in answered]
            if not silent or time.monotonic() > deadline:
                break
        for node in silent:
            observed = f"{node.id} ({node.host}, {node.address}) does not answer this host"
            advice = "nodes connect to each other: open the ports of --ports on both hosts"
            _report(problem("nodes", observed, advice))
        listed = ", ".join(f"{node.id} ({node.host}, {node.address})" for node in nodes)
        if not silent:
            _report(ok("nodes", f"joined in {shown(joined)}; all answer: {listed}"))
        _print(step="running tasks on all nodes")
        for node in nodes:
            if node.workers and node not in silent:
                call = _calls(cluster.options(node=node).submit, CALLS_REMOTE)
                _report(ok("tasks", f"on {node.id}: round trip in {shown(call)}"))
        _print(step="leaving the cluster")


def _since(began: float) -> float:
    return time.perf_counter() - began


def _main(arguments: list[str]) -> int:
    try:
        if arguments[0] == "host":
            _host()
        else:
            _cluster(arguments[1], arguments[2] == "tls")
    except (HopliteError, OSError) as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
