"""`python -m tests.fuzz.coverage_guided NAME -max_total_time=60`: atheris tries one decoder.

Hypothesis makes what somebody thought of; this keeps what reaches new code. Arguments after the
name are libFuzzer's. A finding ends it with exit code 77, a traceback and the bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hoplite_mp"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Returns only if libFuzzer does."""
    (target,) = (target for target in TARGETS if target.name == sys.argv[1])

    def attempt(data: bytes) -> None:
        try:
            target.run(data)
        except target.errors:
            return

    with tempfile.TemporaryDirectory() as corpus:
        for number, sample in enumerate(target.samples):
            Path(corpus, f"sample{number}").write_bytes(sample)
        # A length that is believed shows as memory; libFuzzer's word for the limit is MB.
        options = ["-rss_limit_mb=2048", "-max_len=4096", "-verbosity=0", *sys.argv[2:]]
        atheris.Setup([sys.argv[0], *options, corpus], attempt)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
