"""`hoplite-mp bench` from its options to its exit code.

The folder `benchmarks/` of the repository is not installed, but users who have only the package
want to know how fast it is on their hosts, too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.cluster import ApartCluster
from hoplite_mp._cli.bench.host import host_rows, workers_of
from hoplite_mp._cli.bench.lan import cluster_rows
from hoplite_mp._cli.bench.table import Effort, show, write
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from hoplite_mp._cli.bench.table import BenchRow

__all__ = ["bench"]

# To start and to warm up takes further time, and the least number of rounds may take longer.
WHOLE, QUICK = Effort(15.0, 3), Effort(1.0, 1)
INTERRUPTED = 130  # the exit code that shells use


def bench(arguments: argparse.Namespace) -> int:
    """Measures, and prints a table. Returns the exit code."""
    about: dict[str, Any] = {"quick": arguments.quick, "cluster": arguments.address}
    effort = QUICK if arguments.quick else WHOLE
    rows: list[BenchRow] = []
    try:
        if arguments.json is not None:
            arguments.json.touch()  # so that an error in writing is known before it measures
        for row in _measure(arguments, effort, about):
            rows.append(row)
            print(f"measured: {row.title}", file=sys.stderr)
        print(show(rows))
        if arguments.json is not None:
            write(arguments.json, rows, **about)
    except KeyboardInterrupt:
        print("hoplite-mp bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (HopliteError, OSError, ValueError) as error:  # TimeoutError is an OSError
        print(f"hoplite-mp bench: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(
    arguments: argparse.Namespace, effort: Effort, about: dict[str, Any]
) -> Iterator[BenchRow]:
    if arguments.address is None:
        about["workers"] = workers_of(arguments.workers)
        yield from host_rows(effort, about["workers"])
        return
    tls = False if arguments.no_tls else None
    with ApartCluster(
        workers=0, address=arguments.address, token=arguments.token_file, tls=tls
    ) as cluster:
        about["nodes"] = len(cluster.nodes) - 1
        yield from cluster_rows(cluster, effort)
