"""The common part of the programs for reinforcement learning: episodes, V-trace, and gradients.

This module uses no engine, so that every program trains the same policy with the same steps, and
the programs differ only in how policies, rollouts and gradients are sent. A policy is sent as one
vector of float32. If the vector is longer than the network, the rest is padding, which is sent and
added up like weights, but never used in computations.

Needs: gymnasium, torch.
"""

import collections
import functools
import time
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

HIDDEN = 64
DISCOUNT = 0.99
ENTROPY, CRITIC = 0.01, 0.5  # their weights in the loss
RATE, NORM_MAX = 0.003, 0.5  # learning rate, and maximum norm of the gradient
EPISODES = 100  # number of last episodes for the quality of a policy

# V-trace's bounds of the ratio between an action's probabilities now and when it was taken.
RHO_MAX, C_MAX = 1.0, 1.0


class Network(torch.nn.Module):
    """Returns a preference for each action, and the value of the state."""

    def __init__(self, environment):
        super().__init__()
        with gymnasium.make(environment) as made:
            inputs, actions = made.observation_space.shape[0], int(made.action_space.n)
        self.actor = _layers(inputs, actions)
        self.critic = _layers(inputs, 1)

    def forward(self, observations):
        return self.actor(observations), self.critic(observations).squeeze(-1)

    def parts(self, vector):
        """Tensors like the network's parameters, from the start of a vector."""
        at = 0
        for weights in self.parameters():
            yield torch.tensor(vector[at : at + weights.numel()]).view_as(weights)
            at += weights.numel()

    def load(self, policy):
        """Loads the weights from a policy's vector."""
        with torch.no_grad():
            for weights, part in zip(self.parameters(), self.parts(policy), strict=True):
                weights.copy_(part)

    def store(self, policy):
        """Writes the weights to a policy's vector."""
        _write(self.parameters(), policy)


def _layers(inputs, outputs):
    last = torch.nn.Linear(HIDDEN, outputs)
    torch.nn.init.orthogonal_(last.weight, 0.01)
    hidden = [torch.nn.Linear(inputs, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, HIDDEN)]
    return torch.nn.Sequential(*hidden, torch.nn.Tanh(), last)


def _write(tensors, vector):
    """Writes the tensors one after another, and returns the end of the last."""
    at = 0
    for tensor in tensors:
        vector[at : at + tensor.numel()] = tensor.detach().numpy().ravel()
        at += tensor.numel()
    return at


class Rollout(NamedTuple):
    """A sampler's data, by time and copy of the environment."""

    observations: np.ndarray  # one more than actions: also the last state
    actions: np.ndarray
    rewards: np.ndarray  # scaled by 1 - DISCOUNT, which keeps values near 1
    discounts: np.ndarray  # 0 where an episode ended
    log_probabilities: np.ndarray  # of the actions when they were taken


class Seen(NamedTuple):
    """Statistics: the number of actions, and the returns of episodes that ended."""

    samples: int
    returns: list


class Sampler:
    """Several copies of an environment, played at the same time by one policy."""

    def __init__(self, environment, seed, copies=16, steps=32):
        torch.set_num_threads(1)
        self.network = Network(environment)
        self.dice = torch.Generator().manual_seed(seed)
        self.steps = steps
        again = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.copies = gymnasium.make_vec(environment, copies, "sync", vector_kwargs=again)
        self.now, _ = self.copies.reset(seed=seed)
        self.sums = np.zeros(copies)

    def play(self, policy):
        """Plays `steps` steps in each copy; returns a Rollout and a Seen."""
        self.network.load(policy)
        seen, moves, ended = [self.now], [], []
        for _ in range(self.steps):
            with torch.inference_mode():
                scores = self.network.actor(torch.from_numpy(self.now)).log_softmax(-1)
                action = torch.multinomial(scores.exp(), 1, generator=self.dice)
                log_probability = scores.gather(-1, action)[:, 0].numpy()
            action = action[:, 0].numpy()
            self.now, reward, over, out_of_time, _ = self.copies.step(action)
            over |= out_of_time
            self.sums += reward
            ended += self.sums[over].tolist()
            self.sums[over] = 0
            reward, discount = reward * (1 - DISCOUNT), np.where(over, 0, DISCOUNT)
            seen.append(self.now)
            moves.append((action, np.float32(reward), np.float32(discount), log_probability))
        columns = (seen, *zip(*moves, strict=True))
        return Rollout(*map(np.stack, columns)), Seen(len(moves) * len(action), ended)

    def gradient(self, policy, out):
        """Plays, and writes the gradient of the loss to `out`, a vector like the policy."""
        rollout, seen = self.play(policy)
        backward(self.network, [rollout])
        end = _write((weights.grad for weights in self.network.parameters()), out)
        out[end:] = 0
        return out, seen


def vtrace(log_ratios, discounts, rewards, values, last_value):
    """Values and advantages under the current policy, from rollouts of an older policy (V-trace:
    Espeholt and others, IMPALA, 2018, section 4.1). All arrays are by time and environment, except
    `last_value`, the value of the state after the last step."""
    rho = np.minimum(RHO_MAX, np.exp(log_ratios))
    c = np.minimum(C_MAX, np.exp(log_ratios))
    following = np.concatenate([values[1:], last_value[None]])
    deltas = rho * (rewards + discounts * following - values)
    corrections = np.zeros_like(values)
    carried = np.zeros_like(last_value)
    for t in reversed(range(len(values))):
        carried = deltas[t] + discounts[t] * c[t] * carried
        corrections[t] = carried
    targets = values + corrections
    following = np.concatenate([targets[1:], last_value[None]])
    return targets, rho * (rewards + discounts * following - values)


def backward(network, rollouts):
    """Computes the gradient of the loss in the network's parameters."""
    rollout = Rollout(*(np.concatenate(one, axis=1) for one in zip(*rollouts, strict=True)))
    scores, values = network(torch.from_numpy(rollout.observations))
    scores, values, last_value = scores[:-1].log_softmax(-1), values[:-1], values[-1]
    actions = torch.from_numpy(rollout.actions)[..., None]
    log_probabilities = scores.gather(-1, actions)[..., 0]
    targets, advantages = vtrace(
        log_probabilities.detach().numpy() - rollout.log_probabilities,
        rollout.discounts,
        rollout.rewards,
        values.detach().numpy(),
        last_value.detach().numpy(),
    )
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    actor = -(torch.from_numpy(advantages) * log_probabilities).mean()
    critic = (torch.from_numpy(targets) - values).square().mean()
    entropy = -(scores.exp() * scores).sum(-1).mean()
    network.zero_grad()
    (actor + CRITIC * critic - ENTROPY * entropy).backward()


class Learner:
    """The network, its optimizer, and the policy as a vector of at least `megabytes`."""

    def __init__(self, environment, megabytes=0, seed=0):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.network = Network(environment)
        count = sum(weights.numel() for weights in self.network.parameters())
        self.policy = np.zeros(max(count, round(megabytes * 1e6 / 4)), np.float32)
        self.network.store(self.policy)
        self.optimizer = torch.optim.Adam(self.network.parameters(), RATE)

    def learn(self, rollouts):
        """A step of IMPALA, from rollouts of policies that are a few steps old."""
        backward(self.network, rollouts)
        self._step()

    def apply(self, gradient):
        """A step of A3C, with the mean of the samplers' gradients."""
        parts = self.network.parts(gradient)
        for weights, part in zip(self.network.parameters(), parts, strict=True):
            weights.grad = part
        self._step()

    def _step(self):
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), NORM_MAX)
        self.optimizer.step()
        self.network.store(self.policy)


def mean(gradients):
    """The mean of the vectors, in new memory."""
    total = gradients[0].copy()
    for gradient in gradients[1:]:
        total += gradient
    total /= len(gradients)
    return total


class Record:
    """For each step of a run: its time, its number of samples, and the quality of the policy."""

    def __init__(self):
        self.steps, self.samples, self.returns = [], [], []
        self._last = collections.deque(maxlen=EPISODES)  # returns

    def note(self, seen):
        """Records a step with these samples."""
        self.steps.append(time.monotonic())
        self.samples.append(sum(one.samples for one in seen))
        self._last += [episode for one in seen for episode in one.returns]
        self.returns.append(float(np.mean(self._last)) if self._last else None)

    def found(self):
        """The results: times, samples, and the mean of the last EPISODES returns for each step."""
        return {"steps": self.steps, "samples": self.samples, "returns": self.returns}


@functools.cache
def sampler(environment, seed):
    """A single instance for this process, because tasks have no state of their own."""
    return Sampler(environment, seed)
