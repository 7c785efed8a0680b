"""One rank of one build on one emulated host: a timed call of a Group for each input line.

The counterpart of here.py over hosts. benchmarks/lan/rounds.py defines the timing and the
checks."""

from __future__ import annotations

import sys
from pathlib import Path

import hoplite_mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # after the build's own package

from benchmarks.lan.member import Member
from benchmarks.lan.rounds import timed


def main() -> None:
    """Arguments: address, tls (0, 1), size, rank. Lines: kind, bytes, turn."""
    address, tls, size, rank = sys.argv[1:]
    secured = None if tls == "1" else False
    with hoplite_mp.Cluster(address=address, tls=secured, memory="1500MiB") as c:
        member = Member(c.group("pairs", int(size), int(rank)))
        for line in sys.stdin:
            kind, nbytes, turn = line.split()
            print(timed(member, kind, int(nbytes), int(turn))[0], flush=True)


if __name__ == "__main__":
    main()
