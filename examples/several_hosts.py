"""How do I use several hosts, and choose where tasks run and arrays are stored?

Run `hoplite-mp up --listen HOST:PORT` on one host, `hoplite-mp join HOST:PORT` on the other hosts,
and this program with the argument HOST:PORT. Without an argument the program starts three nodes on
this host.
"""

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import hoplite_mp

COMMAND = [sys.executable, "-m", "hoplite_mp"]


@contextlib.contextmanager
def three_nodes():
    """The address and token file of a cluster that ends with the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def start(*words):
            options = ["--workers", "2", "--token-file", f"{folder}/token"]
            process = stack.enter_context(
                subprocess.Popen(
                    [*COMMAND, *words, *options],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            stack.callback(process.terminate)
            return process.stdout.readline()

        line = start("up", "--listen", "127.0.0.1:0")  # hoplite-mp join ADDRESS --token-file F
        address = line.split()[2]
        start("join", address)
        start("join", address)
        yield address, Path(folder, "token")


def mean_of(block, seed):
    return float(block.mean()) + seed


def use(address, token=None):
    with hoplite_mp.Cluster(address=address, token=token) as c:
        for node in c.nodes:
            print(node)
        here, *others = c.nodes
        block = c.put(np.ones(2_000_000))
        c.broadcast(block).result()  # a tree over all nodes, in blocks
        print("held by", c.locations(block))
        assert len(c.locations(block)) == len(c.nodes)
        for node in others:  # a task bound to a node
            assert c.options(node=node).submit(mean_of, block, 1).result() == 2.0
        parts = [c.options(node=node).submit(np.full, 1_000_000, 2.0) for node in c.nodes]
        total = c.reduce(parts, op="sum", to=here)
        assert c.get(total)[0] == 2.0 * len(c.nodes)
        print(f"the sum over {len(c.nodes)} nodes is at {c.locations(total)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        use(sys.argv[1])
    else:
        with three_nodes() as (address, token):
            use(address, token)
