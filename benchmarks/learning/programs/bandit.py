"""Agents of a linear bandit on all hosts, the server on one that may be killed.

One run for each seed: `alpha` 0 communicates after every round. Without a server actor
(`here=True`) the same rounds are played in this process, agents in turn.
"""

import time

import numpy as np

from examples.applications import our_hosts
from examples.applications.running import arguments, say
from hoplite_mp import ml

FEATURES, ARMS, NOISE, BETA = 10, 10, 0.1, 0.5


def unit(rng, *shape):
    found = rng.normal(size=shape)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


def play(agent, seed, number, rounds):
    """The regret of each round of one agent."""
    truth = unit(np.random.default_rng(seed), FEATURES)
    rng = np.random.default_rng([seed, number])
    regret = []
    for _ in range(rounds):
        arms = unit(rng, ARMS, FEATURES)
        rewards = arms @ truth
        chosen = agent.choose(arms)
        agent.update(rewards[chosen] + NOISE * rng.normal())
        regret.append(rewards.max() - rewards[chosen])
        yield regret[-1]


def in_a_task(server, seed, number, rounds, alpha):
    """An agent on a host of its own: its regret, messages and observations."""
    agent = ml.FedLinUCB(FEATURES, alpha, BETA, server=server)
    regret = sum(play(agent, seed, number, rounds))
    messages = agent.messages
    agent.synchronize()
    return regret, messages, agent.sent + agent.received


def here(seed, agents, rounds, alpha):
    """All agents in this process, one round of each in turn; regret over rounds, messages."""
    server = ml.LinUCBServer(FEATURES)
    members = [ml.FedLinUCB(FEATURES, alpha, BETA, server=server) for _ in range(agents)]
    games = [play(member, seed, n, rounds // agents) for n, member in enumerate(members)]
    regret = [value for turn in zip(*games, strict=True) for value in turn]
    return np.cumsum(regret), sum(member.messages for member in members)


def main():
    given = arguments(tls=False, agents=8, rounds=4000, alpha=1.0, seeds=3)
    results = []
    with our_hosts.connect(given) as c:
        view = c.options(resources={"place": 1})
        say("begun")
        for seed in range(given.seeds):
            # The first host has the driver, and is not the one to be killed.
            server = ml.FedLinUCB.serve(FEATURES, name=f"bandit-{seed}")
            begun = time.monotonic()
            members = [
                view.submit(in_a_task, server, seed, n, given.rounds // given.agents, given.alpha)
                for n in range(given.agents)
            ]
            found = [member.result() for member in members]
            seconds = time.monotonic() - begun
            observations = server.totals().result()[2]
            restarts = our_restarts(server)
            results.append([seconds, *np.sum(found, axis=0).tolist(), observations, restarts])
        say("ended")
    say("result", runs=results)


def our_restarts(server):
    from hoplite_mp import Actor

    return Actor.restarts(server)


if __name__ == "__main__":
    main()
