"""The command `hoplite-mp doctor`: selects and orders the checks."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from hoplite_mp._cli.doctor import capacity, findings, network, software
from hoplite_mp._cli.doctor.findings import run, show, summary
from hoplite_mp._cli.doctor.trial import trial_of_cluster, trial_of_host

if TYPE_CHECKING:
    import argparse

    from hoplite_mp._cli.doctor.findings import Check, Finding

__all__ = ["doctor"]

INTERRUPTED = 130  # the exit code that shells use


def doctor(arguments: argparse.Namespace) -> int:
    """Runs the checks, and prints each finding immediately. Returns 1 if there is a problem,
    otherwise 0."""
    found: list[Finding] = []
    try:
        _run_checks(arguments, found)
    except KeyboardInterrupt:
        print("hoplite-mp doctor: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{summary(found)}")
    return int(any(finding.level == "problem" for finding in found))


def _run_checks(arguments: argparse.Namespace, found: list[Finding]) -> None:
    columns = shutil.get_terminal_size((100, 24)).columns
    address, token_file, tls = arguments.address, arguments.token_file, not arguments.no_tls

    def succeed(checks: list[Check]) -> bool:
        """Runs the checks and prints their findings. Returns whether there is no problem."""
        before = len(found)
        for finding in run(checks):
            found.append(finding)
            print(show(finding, columns), flush=True)
        return all(finding.level != "problem" for finding in found[before:])

    host = [*software.CHECKS, *findings.CHECKS, *capacity.CHECKS]
    succeed([*host, *network.host_checks(token_file, address is not None)])
    if not arguments.no_start:
        succeed([trial_of_host()])
    # This host can join only if its handshake with the manager succeeds.
    reached = address is None or succeed(network.checks_of(address, token_file, tls))
    if address is not None and reached and not arguments.no_start:
        succeed([trial_of_cluster(address, token_file, tls)])
