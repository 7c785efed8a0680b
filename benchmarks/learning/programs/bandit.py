"""Agents of a linear bandit, each on a host of its own, with a server that is killed once.

In the first run the server's process is killed in the middle, after it has applied an exchange and
before that is stored.
"""

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

from examples.applications import our_hosts
from examples.applications.running import arguments, say
from hoplite_mp import Actor, ml

FEATURES, ARMS, NOISE, BETA = 10, 10, 0.1, 0.5


class Server(ml.LinUCBServer):
    """Its process is killed once, in exchange number `at`; 0: never."""

    def __init__(self, n_features, at, marker):
        super().__init__(n_features)
        self.at, self.marker, self.seen = at, marker, 0

    def exchange(self, gram, moment, rounds):
        found = super().exchange(gram, moment, rounds)
        self.seen += 1
        if self.seen == self.at and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def unit(rng, *shape):
    found = rng.normal(size=shape)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


def play(agent, seed, number, rounds):
    """The regret of each round of one agent."""
    truth = unit(np.random.default_rng(seed), FEATURES)
    rng = np.random.default_rng([seed, number])
    for _ in range(rounds):
        arms = unit(rng, ARMS, FEATURES)
        rewards = arms @ truth
        chosen = agent.choose(arms)
        agent.update(rewards[chosen] + NOISE * rng.normal())
        yield rewards.max() - rewards[chosen]


def on_a_host(server, seed, number, rounds, alpha):
    """Regret, messages and bytes of an agent."""
    agent = ml.FedLinUCB(FEATURES, alpha, BETA, server=server)
    regret = sum(play(agent, seed, number, rounds))
    messages, moved = agent.messages, agent.sent + agent.received
    agent.synchronize()  # for the count of observations
    return regret, messages, moved


def in_turn(seed, agents, rounds, alpha):
    """All agents in this process, one round of each in turn: summed regret, messages."""
    server = ml.LinUCBServer(FEATURES)
    members = [ml.FedLinUCB(FEATURES, alpha, BETA, server=server) for _ in range(agents)]
    games = [play(member, seed, n, rounds // agents) for n, member in enumerate(members)]
    regret = [value for turn in zip(*games, strict=True) for value in turn]
    return np.cumsum(regret), sum(member.messages for member in members)


def main():
    given = arguments(tls=False, seeds=3, rounds=4000, alpha=1.0, kill_at=50)
    marker = Path(tempfile.mkdtemp()) / "killed"
    runs = []
    with our_hosts.connect(given) as c:
        places, served = c.options(resources={"place": 1}), c.options(retries=8, restarts=8)
        # The marker is a file of this host. The program may have its own node, without workers.
        near = next(node for node in c.nodes if node.workers and node.host == c.here.host)
        say("begun")
        for seed in range(given.seeds):
            at = given.kill_at if seed == 0 else 0
            server = served.options(checkpoint=1, node=near).actor(Server, FEATURES, at, marker)
            begun, share = time.monotonic(), given.rounds // given.hosts
            members = [
                places.submit(on_a_host, server, seed, number, share, given.alpha)
                for number in range(given.hosts)
            ]
            sums = np.sum([member.result() for member in members], axis=0)
            seconds = time.monotonic() - begun
            observations, restarts = server.totals().result()[2], Actor.restarts(server)
            runs.append([seconds, *sums.tolist(), observations, restarts])
        say("ended")
    marker.unlink(missing_ok=True)
    marker.parent.rmdir()
    say("result", runs=runs)


if __name__ == "__main__":
    main()
