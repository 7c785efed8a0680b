"""FedLinUCB: when agents communicate, what they learn, and a server that is killed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml
from hoplite_mp.ml._linucb import LinUCBServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as made:
        yield made


class DiesOnce(LinUCBServer):
    """The process is killed in one exchange, after it has changed the state."""

    def __init__(self, n_features: int, marker: Path, at: int) -> None:
        super().__init__(n_features)
        self.marker, self.at, self.seen = marker, at, 0

    def exchange(self, gram: Any, moment: Any, rounds: int) -> Any:
        found = super().exchange(gram, moment, rounds)
        self.seen += 1
        if self.seen == self.at and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def arms_of(seed: int, rounds: int, features: int = 3) -> Any:
    """Of integers, so that sums are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, size=(rounds, features)).astype(float)


def observe(server: Any, seed: int, rounds: int, alpha: float) -> int:
    agent = ml.FedLinUCB(3, alpha=alpha, server=server)
    for number, arm in enumerate(arms_of(seed, rounds)):
        agent.update(number % 5, arm)
    agent.synchronize()
    return agent.messages


def expected(seeds: range, rounds: int) -> tuple[Any, Any]:
    arms = [arms_of(seed, rounds) for seed in seeds]
    rewards = np.arange(rounds) % 5
    return sum(one.T @ one for one in arms), sum(rewards @ one for one in arms)


@given(st.integers(0, 2**32 - 1), st.floats(0, 4), st.integers(1, 40), st.integers(1, 4))
def test_the_determinant_decides_who_communicates(
    seed: int, alpha: float, rounds: int, agents: int
) -> None:
    """In exact terms: an agent that has not communicated is below 1 + alpha."""
    rng = np.random.default_rng(seed)
    server = LinUCBServer(3)
    members = [ml.FedLinUCB(3, alpha=alpha, ridge=0.5, server=server) for _ in range(agents)]
    known = [0.5 * np.eye(3)] * agents
    own = [np.zeros((3, 3))] * agents
    for _ in range(rounds):
        who, arm = int(rng.integers(agents)), rng.normal(size=3)
        own[who] = own[who] + np.outer(arm, arm)
        grown = np.linalg.det(known[who] + own[who]) / np.linalg.det(known[who])
        communicated = members[who].update(1.0, arm)
        if abs(grown - 1 - alpha) > 1e-9:
            assert communicated == (grown > 1 + alpha)
        if communicated:
            own[who] = np.zeros((3, 3))
            known[who] = server.gram + 0.5 * np.eye(3)
    for member in members:
        member.synchronize()
    assert server.rounds == rounds
    assert sum(member.messages for member in members) % 2 == 0


@given(st.integers(0, 99), st.floats(0.1, 9))
def test_bounds_are_those_of_ridge_regression(seed: int, ridge: float) -> None:
    rng = np.random.default_rng(seed)
    x, y, arms = rng.normal(size=(20, 4)), rng.normal(size=20), rng.normal(size=(6, 4))
    agent = ml.FedLinUCB(4, alpha=0, beta=0.7, ridge=ridge)
    for arm, reward in zip(x, y, strict=True):
        assert agent.update(reward, arm)
    gram = x.T @ x + ridge * np.eye(4)
    estimate = np.linalg.solve(gram, x.T @ y)
    deviation = np.sqrt([arm @ np.linalg.solve(gram, arm) for arm in arms])
    np.testing.assert_allclose(agent.bounds(arms), arms @ estimate + 0.7 * deviation, rtol=1e-7)
    assert agent.choose(arms) == int(np.argmax(agent.bounds(arms)))
    assert (agent.messages, agent.sent, agent.received) == (40, 20 * 160, 20 * 160)


@pytest.mark.parametrize("at", [1, 3])
def test_a_killed_server_loses_nothing_and_applies_nothing_twice(
    cluster: hoplite_mp.Cluster, tmp_path: Path, at: int
) -> None:
    marker = tmp_path / "died"
    view = cluster.options(checkpoint=1, restarts=2, retries=2)
    server = view.actor(DiesOnce, 3, marker, at)
    members = [cluster.submit(observe, server, seed, 20, 0.3) for seed in range(2)]
    messages = [member.result(60) for member in members]
    assert marker.exists()
    gram, moment, rounds = server.totals().result(20)
    wanted = expected(range(2), 20)
    np.testing.assert_array_equal(gram, wanted[0])
    np.testing.assert_array_equal(moment, wanted[1])
    assert rounds == 40
    assert all(4 <= count < 42 for count in messages)


def test_served_agents_learn_from_each_other(cluster: hoplite_mp.Cluster) -> None:
    server = ml.FedLinUCB.serve(3, name="bandit")
    first, second = (ml.FedLinUCB(3, alpha=0, server=server) for _ in range(2))
    for arm in np.eye(3):
        assert first.update(float(arm[2]), arm)
    second.synchronize()
    assert second.choose(np.eye(3)) == 2
    assert cluster.get_actor("bandit").totals().result(20)[2] == 3
    hoplite_mp.Actor.close(server)


def test_a_lost_server_leaves_the_observations_with_the_agent(cluster: hoplite_mp.Cluster) -> None:
    server = cluster.actor(LinUCBServer, 3)
    agent = ml.FedLinUCB(3, alpha=0, server=server)
    hoplite_mp.Actor.kill(server)
    with pytest.raises(hoplite_mp.ActorLostError):
        agent.update(1.0, np.ones(3))
    agent.server = LinUCBServer(3)
    agent.synchronize()
    np.testing.assert_array_equal(agent.server.gram, np.ones((3, 3)))
    assert agent.server.rounds == 1


@pytest.mark.parametrize(
    "bad",
    [{"n_features": 0}, {"alpha": -1}, {"beta": float("nan")}, {"ridge": 0}],
)
def test_bad_arguments_are_value_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        ml.FedLinUCB(**({"n_features": 3} | bad))


def test_arrays_of_other_shapes_are_refused() -> None:
    agent = ml.FedLinUCB(3)
    with pytest.raises(ValueError, match="no arm was chosen"):
        agent.update(1.0)
    for arms in (np.zeros(3), np.zeros((2, 4)), np.zeros((0, 3))):
        with pytest.raises(ValueError, match="arms have shape"):
            agent.choose(arms)
    with pytest.raises(ValueError, match="an arm has shape"):
        agent.update(1.0, np.zeros(4))
    with pytest.raises(ValueError, match="2 features, but the agent has 3"):
        ml.FedLinUCB(3, alpha=0, server=LinUCBServer(2)).update(1.0, np.ones(3))
