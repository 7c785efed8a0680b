"""What reinforcement learning in examples/applications/ computes, and that its programs learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.applications import reinforcement, training
from benchmarks.applications.beds import Bed
from benchmarks.applications.running import run
from benchmarks.applications.usage import link_bytes
from examples.applications import policies
from tests.support.applications import needs_data, needs_hosts, result_of

LONG = pytest.mark.long
SYSTEMS = ["ours", *(pytest.param(name, marks=LONG) for name in
                     ("ray_alone", "ray_with_ours", "dask_alone"))]  # fmt: skip


def corrected(ratios: Any, discounts: Any, rewards: Any, values: Any, at: int) -> float:
    """v_s of the paper, word for word: V(x_s) and, for each later step t, what was learned there,
    times all discounts and all c on the way from s to t. `values` has one more than there are
    steps."""
    total = float(values[at])
    for t in range(at, len(rewards)):
        weight = 1.0
        for i in range(at, t):
            weight *= discounts[i] * min(policies.C_MAX, ratios[i])
        rho = min(policies.RHO_MAX, ratios[t])
        total += weight * rho * (rewards[t] + discounts[t] * values[t + 1] - values[t])
    return total


@given(
    steps=st.integers(1, 8),
    copies=st.integers(1, 3),
    spread=st.sampled_from([0.0, 0.3, 2.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vtrace_is_that_of_the_paper(steps: int, copies: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    log_ratios = spread * rng.normal(size=(steps, copies))
    discounts = policies.DISCOUNT * rng.integers(0, 2, size=(steps, copies))
    rewards = rng.normal(size=(steps, copies))
    values = rng.normal(size=(steps + 1, copies))
    found, advantages = policies.vtrace(log_ratios, discounts, rewards, values[:-1], values[-1])
    assert found.shape == advantages.shape == (steps, copies)
    for b in range(copies):
        ratios = np.exp(log_ratios[:, b])
        of = (ratios, discounts[:, b], rewards[:, b], values[:, b])
        right = [corrected(*of, s) for s in range(steps)] + [values[-1, b]]
        assert found[:, b] == pytest.approx(right[:-1])
        for s in range(steps):
            rho = min(policies.RHO_MAX, ratios[s])
            q = rewards[s, b] + discounts[s, b] * right[s + 1]
            assert advantages[s, b] == pytest.approx(rho * (q - values[s, b]))


def test_without_a_delay_vtrace_is_the_sum_of_discounted_rewards() -> None:
    rewards = np.array([[1.0], [2.0], [4.0]])
    found, _ = policies.vtrace(
        np.zeros((3, 1)), np.full((3, 1), 0.5), rewards, np.zeros((3, 1)), np.array([8.0])
    )
    assert found[:, 0].tolist() == [1 + 0.5 * (2 + 0.5 * (4 + 0.5 * 8)), 2 + 0.5 * 8, 8.0]


def test_episodes_end_and_begin_again() -> None:
    learner = policies.Learner("CartPole-v1")
    sampler = policies.Sampler("CartPole-v1", seed=1, copies=4, steps=100)
    rollout, seen = sampler.play(learner.policy)
    again, _ = sampler.play(learner.policy)
    assert np.array_equal(rollout.observations[-1], again.observations[0])
    assert rollout.observations.shape == (101, 4, 4)
    assert rollout.actions.shape == rollout.log_probabilities.shape == (100, 4)
    assert seen.samples == 400
    over = rollout.discounts == 0
    assert len(seen.returns) == over.sum() > 4
    assert set(np.unique(rollout.discounts)) == {np.float32(0), np.float32(policies.DISCOUNT)}
    # CartPole gives 1 for each step: returns are lengths of episodes, and begin near the middle.
    lengths = np.diff(np.flatnonzero(over[:, 0]), prepend=-1)
    assert set(lengths) <= set(seen.returns)
    assert np.abs(rollout.observations[1:][over]).max() <= 0.05


def test_a_policy_is_loaded_and_stored() -> None:
    learner = policies.Learner("Acrobot-v1", megabytes=1, seed=3)
    assert learner.policy.nbytes == 1_000_000
    other = policies.Network("Acrobot-v1")
    learner.policy.flags.writeable = False  # as it comes from a store
    other.load(learner.policy)
    for mine, theirs in zip(learner.network.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_with_gradients_is_a_step_with_their_rollouts() -> None:
    """A3C with one sampler, and IMPALA with the same rollout of the policy of now."""
    one, other = policies.Learner("CartPole-v1", 0.1), policies.Learner("CartPole-v1", 0.1)
    before = one.policy.copy()
    rollout, _ = policies.Sampler("CartPole-v1", 7).play(one.policy)
    one.learn([rollout])
    out = np.full_like(other.policy, np.nan)
    gradient, seen = policies.Sampler("CartPole-v1", 7).gradient(other.policy, out)
    assert gradient is out
    assert seen.samples == rollout.actions.size
    other.apply(policies.mean([gradient, gradient]))
    assert one.policy == pytest.approx(other.policy, abs=1e-6)
    changed = np.flatnonzero(one.policy != before)
    count = sum(weights.numel() for weights in one.network.parameters())
    assert len(changed) > 0.9 * count
    assert changed.max() < count  # padding stays as it is
    assert not gradient[count:].any()


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("algorithm", ["impala", "a3c"])
def test_a_program_learns(algorithm: str, system: str) -> None:
    found = result_of(f"{algorithm}.{system}", hosts=3, seconds=5.0, megabytes=0.2)
    assert len(found["steps"]) == len(found["samples"]) == len(found["returns"])
    assert found["steps"] == sorted(found["steps"])
    assert set(found["samples"]) == {512}  # of one of two samplers
    # By chance a policy gets 22. How far it comes depends on how many steps there is time for.
    if len(found["steps"]) >= 40:
        assert max(found["returns"]) > 40


STEPS: dict[str, Any] = {"steps": 40, "megabytes": 1, "seconds": None}


@needs_data
@pytest.mark.parametrize("killed", [pytest.param(False, marks=LONG), True])
def test_training_in_equal_steps(killed: bool) -> None:
    found = result_of("synchronous_training.ours", hosts=3, kill_at=10 if killed else None, **STEPS)
    assert len(found["steps"]) == len(found["losses"]) == 40
    assert found["ranks"][:10] == [3] * 10
    assert found["ranks"][10] == (2 if killed else 3)
    assert training.last_loss(found) < found["losses"][0] / 1.5


@needs_data
@LONG
def test_gloo_makes_the_same_steps_and_ends_with_a_rank() -> None:
    ours = result_of("synchronous_training.ours", hosts=3, **STEPS)
    gloo = result_of("synchronous_training.gloo", hosts=3, **STEPS)
    assert gloo["losses"] == pytest.approx(ours["losses"], rel=1e-2)
    assert gloo["error"] is None
    ended = result_of("synchronous_training.gloo", hosts=3, kill_at=10, **STEPS)
    assert ended["error"].startswith("in step 10: ")
    assert ended["losses"] == gloo["losses"][:10]


@needs_data
@needs_hosts
@LONG
@pytest.mark.timeout(300)
def test_ranks_on_emulated_hosts() -> None:
    arguments = {"steps": 8, "megabytes": 1}
    losses = []
    for system, program in training.PROGRAMS.items():
        module = f"examples.applications.synchronous_training.{program}"
        with Bed(system, 3, memory=256 << 20, env=training.ENV) as bed:
            found = run(bed, module, arguments, 120.0, everywhere=system == "none")
            sent = link_bytes(bed.lan).up
        # Each host has a rank: it sends twice two thirds of the gradients in each step.
        assert min(sent.values()) > 8 * 1_000_000
        losses.append(found["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_what_is_told_of_training() -> None:
    result = {
        "steps": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 10.0],
        "losses": [9.0, *range(8)],
        "ranks": [3, 3, 3, 3, 3, 3, 3, 2, 3],
    }
    assert training.step_s(result) == 1.0
    assert training.longest(result) == 3.0
    assert training.PICTURE.marks(result) == {"a rank is killed": 9.0, "it is back": 10.0}
    assert training.PICTURE.points(result)[1] == (1.0, 4.5)


def test_what_is_told_of_samplers() -> None:
    result = {"steps": [1.0, 2.0, 5.0], "samples": [100, 30, 50], "returns": [None, 20.0, 30.0]}
    assert reinforcement.rate(result) == 20.0
    assert reinforcement.reached(result) == 30.0
    cartpole, acrobot = reinforcement.APPLICATION.pictures[:2]
    assert cartpole.points(result) == [(1.0, 20.0), (4.0, 30.0)]
    assert acrobot.points(result) == [(1.0, -20.0), (4.0, -30.0)]


def test_what_the_links_allow() -> None:
    assert reinforcement.links(8) == 4
    assert reinforcement.links(4) == 2
