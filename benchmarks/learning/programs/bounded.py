"""Allreduces of one array over and over, plain and bounded, on links that other traffic slows."""

import time

import numpy as np

import hoplite_mp
from examples.applications import our_hosts
from examples.applications.running import arguments, say

WARM_UP = 3


def train(rank, given, name):
    """The seconds of each call of this rank, and the ranks that the call has left out."""
    x = np.full(given.items, rank + 1.0, np.float32)
    bound = {} if not given.deadline else {"deadline": given.deadline, "num": given.num}
    took, left_out = [], []
    with hoplite_mp.current().group(name, given.hosts, rank) as group:
        begun = 0.0
        for call in range(WARM_UP + given.calls):
            if call == WARM_UP:
                group.barrier()
                begun = time.monotonic()
            since = time.monotonic()
            total = group.allreduce(x, **bound)
            took.append(time.monotonic() - since)
            left_out.append(given.hosts - len(group.contributors))
            assert total[0] == total[-1] == sum(one + 1 for one in group.contributors)
            time.sleep(given.pause)
    return took[WARM_UP:], left_out[WARM_UP:], begun


def main():
    given = arguments(tls=False, items=1 << 20, calls=50, pause=0.05, deadline=0.0, num=1)
    with our_hosts.connect(given) as c:
        view, name = c.options(resources={"place": 1}), f"bounded-{time.monotonic()}"
        say("begun")
        members = [view.submit(train, rank, given, name) for rank in range(given.hosts)]
        found = [member.result() for member in members]
        say("ended")
    say("result", took=[one[0] for one in found], left_out=found[0][1])


if __name__ == "__main__":
    main()
