"""`python -m tests.lan up 8 --rate 1gbit`: hosts to try things on, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys

from tests.lan import UNLIMITED, Lan, why_not


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start hosts and keep them until Ctrl-C")
    up.add_argument("size", type=int, help="how many hosts")
    up.add_argument("--rate", default=UNLIMITED, help='of each link, each way: "1gbit"')
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    with Lan(options.size, options.rate) as lan:
        for host in lan:
            places = [f"{k}={shlex.quote(v)}" for k, v in host.environment().items()
                      if k in ("HOME", "TMPDIR") or k.startswith("XDG_")]  # fmt: skip
            command = shlex.join(host.enter("env", "-C", os.getcwd()))
            print(
                f"{host.name} {host.address} [{host.address6}]: {command} {' '.join(places)} bash"
            )
        print("Ctrl-C ends them.", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
