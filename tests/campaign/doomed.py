"""A program whose host dies under it: `python -m tests.campaign.doomed SEED`.

Here it is not values that count, but that every call of every driver ends, by whatever means it
waits, once the node or the supervisor of the host is gone; that the drivers end in order, and that
nothing of the host is left.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.campaign.program import Program
from tests.campaign.watching import Failed

__all__ = ["run"]

BEFORE_S = 1.5  # at most, until it dies
GONE_S = 30.0


class Doomed(Program):
    """As others, until somebody kills what all hangs on."""

    exposed = True

    def play_to_death(self) -> str:
        """Who was killed."""
        self.make()
        self.maker.tell("go")
        self.attach()
        time.sleep(self.dice.random() * BEFORE_S)
        self.healthy()
        maker = psutil.Process(self.maker.process.pid)
        supervisor = maker.children()[0]
        family = [supervisor, *supervisor.children(recursive=True)]
        node = next(one for one in family if one.name() == "hoplite node")
        victim = self.dice.choice((supervisor, node))
        name = victim.name()
        self.tally.begin("host")
        victim.kill()
        for one in list(self.drivers):
            self.ask(one, "drop", "dropped")
            self.end(one)
        _, left = psutil.wait_procs(family, GONE_S)
        if left:
            raise Failed(f"processes are left: {left}")
        return name


def run(seed: int) -> str:
    """Plays one; the name of the process that was killed."""
    kind = random.Random(seed).choice(("roomy", "spilling"))
    with tempfile.TemporaryDirectory(prefix="campaign") as folder:
        program = Doomed(seed, kind, Path(folder))
        try:
            with program.playing():
                return program.play_to_death()
        except Failed as error:
            raise Failed(f"seed {seed}, doomed, {kind}: {error}") from None


if __name__ == "__main__":
    print(run(int(sys.argv[1])))
