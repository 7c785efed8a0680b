"""`python -m benchmarks.engines [-n 8] [--engines ray dask]`: collectives inside Ray and Dask.

Needs root, and the environment of the engines (`make bench-engines`). Rows: the speed of a
broadcast and of a reduction of 64 MiB, relative to the engine's own; and the same calls inside the
engine compared with a cluster without it, on the same hosts. Links are limited by tc. The bound of
a star of links is measured with plain sockets. TLS is off, as in the engines. All results are
written to benchmarks/results/engines-N.json."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.common import MIB, ROOT, Row
from benchmarks.lan.hosts import bound_s, cluster, link_rate
from benchmarks.lan.refs import ref_rows
from benchmarks.report import table as drawn
from tests.engines.dask_hosts import DaskHosts
from tests.engines.programs import Logs
from tests.engines.ray_hosts import RayHosts
from tests.lan import Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.lan import Host

LARGE = 64 * MIB
STORE_BYTES = 1 << 30  # of Ray's, on each host
PATIENCE_S = 1500.0
AT_ONCE = 2  # hosts of Ray that begin
IDLE_S = 5.0
FASTER, ALONE = 2.5, 1.1
KINDS = ("broadcast", "reduce")
ENGINES = ("ray", "dask")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether targets are met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("-n", type=int, default=8, help="hosts (%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc has it")
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    table: list[Row] = []
    for engine in options.engines:
        with Lan(options.n, options.rate) as lan, tempfile.TemporaryDirectory() as folder:
            link = link_rate(lan[0], lan[1])
            print(f"{engine}, links: {link / 1e6:.1f} MB/s each way, no TLS", flush=True)
            with cluster(lan, False, 1, "1GiB") as address:
                alone = ref_rows(lan[0], address, False, KINDS, LARGE, options.rounds, options.n)
            logs = Logs(Path(folder) / "logs")
            run = _ray if engine == "ray" else _dask
            try:
                found = run(lan, logs, options)
            except BaseException:
                print(logs.said(), file=sys.stderr)
                raise
        table += _rows(engine.capitalize(), found, alone, link, options.n)
    print(drawn([row.as_dict() for row in table]))
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    words = [row.as_dict() for row in table]
    (results / f"engines-{options.n}.json").write_text(json.dumps(words, indent=1))
    return 0


def _rows(
    engine: str, found: Mapping[str, float], alone: Mapping[str, float], link: float, size: int
) -> Iterator[Row]:
    """found: medians of what the driver has timed."""
    for kind in KINDS:
        title = f"{kind} of 64 MiB inside {engine}, {size} hosts"
        bound = bound_s(kind, LARGE, size, link)
        for ours in [name for name in found if name.partition(" of ")[0] == kind]:
            how = title + ours[len(kind) :].replace(" of refs", ", of refs")
            yield Row(how, found[ours], "s", "bound", bound, ratio=found[ours] / bound)
            for other in [name for name in found if name.startswith(f"{engine}'s {kind}")]:
                times = found[other] / found[ours]
                yield Row(
                    how, found[ours], "s", other, found[other],
                    ratio=times, wanted=FASTER, direction=">=",
                )  # fmt: skip
        inside = found[f"inside {kind}"]
        yield Row(
            f"{kind}: the call of Cluster inside {engine}", inside, "s",
            f"without {engine}", alone[kind], ratio=inside / alone[kind], wanted=ALONE,
        )  # fmt: skip


def _ray(lan: Lan, logs: Logs, options: argparse.Namespace) -> dict[str, float]:
    hosts = RayHosts(lan, logs, cpus=1, store_bytes=STORE_BYTES)
    # Few at a time: they share this machine's cores while they begin, and Ray is not patient.
    for count, host in enumerate(list(lan)[1:], 2):
        hosts.add(host)
        if count == options.n or count % AT_ONCE == 0:
            hosts.await_nodes(count)
    _say_how_busy("Ray")
    return _driven(lan[0], hosts.env, "benchmarks.engines.ray_driver", logs, options)


def _dask(lan: Lan, logs: Logs, options: argparse.Namespace) -> dict[str, float]:
    hosts = DaskHosts(lan, logs)
    for host in lan:
        hosts.add_workers(host)
    _say_how_busy("Dask")
    return _driven(lan[0], hosts.env, "benchmarks.engines.dask_driver", logs, options)


def _say_how_busy(engine: str) -> None:
    """What the engine's processes of all hosts take while nobody asks for anything: the same
    processors carry what is measured."""
    time.sleep(IDLE_S)
    before = psutil.cpu_times()
    time.sleep(IDLE_S)
    after = psutil.cpu_times()
    busy = sum(after[:3]) - sum(before[:3])  # user, nice, system
    print(f"{engine}, idle: {busy / IDLE_S:.2f} processors are busy", flush=True)


def _driven(
    host: Host, env: Mapping[str, str], module: str, logs: Logs, options: argparse.Namespace
) -> dict[str, float]:
    """Medians over rounds of what that program times."""
    numbers = [str(LARGE), str(options.rounds), str(options.n)]
    with open(logs.of("driver"), "ab") as log:
        process = host.popen(
            [sys.executable, "-W", "ignore", "-m", module, *numbers],
            env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    out, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}")
    found = json.loads(out)
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
