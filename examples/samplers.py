"""How do I learn from many simulations at once, and use the first episodes that end?

Samplers are actors that keep their own random numbers. The learner uses episodes as they end, and
restarts each sampler at once with the current policy. The environment is a pole on a cart, the
learner a cross-entropy method.
"""

import numpy as np

import hoplite_mp

SAMPLERS, ROUNDS, PER_ROUND, STEPS_MAX = 3, 25, 24, 200


class Sampler:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def episode(self, mean, spread):
        """The number of steps that the pole stays up, and the weights drawn from the policy."""
        weights = mean + spread * self.rng.normal(size=4)
        x, v, angle, turn = self.rng.uniform(-0.05, 0.05, size=4)
        for step in range(STEPS_MAX):
            force = 10.0 if weights @ (x, v, angle, turn) > 0 else -10.0
            push = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
            bend = 9.8 * np.sin(angle) - np.cos(angle) * push
            bend /= 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
            pull = push - 0.05 * bend * np.cos(angle) / 1.1
            x, v, angle, turn = (
                x + 0.02 * v,
                v + 0.02 * pull,
                angle + 0.02 * turn,
                turn + 0.02 * bend,
            )
            if abs(x) > 2.4 or abs(angle) > 0.21:
                return step, weights
        return STEPS_MAX, weights


def main():
    mean, spread = np.zeros(4), np.ones(4)
    with hoplite_mp.Cluster(workers=0) as c:
        samplers = [c.actor(Sampler, seed) for seed in range(SAMPLERS)]
        running = {sampler.episode(mean, spread): sampler for sampler in samplers}
        for _ in range(ROUNDS):
            found = []
            while len(found) < PER_ROUND:
                done, _ = c.wait(list(running), num=1)
                for call in done:
                    sampler = running.pop(call)
                    found.append(call.result())
                    running[sampler.episode(mean, spread)] = sampler
            best = sorted(found, key=lambda one: one[0])[-PER_ROUND // 4 :]
            mean = np.mean([weights for _, weights in best], axis=0)
            spread = np.std([weights for _, weights in best], axis=0) + 0.1
        scores = [samplers[0].episode(mean, np.zeros(4)).result()[0] for _ in range(10)]
    print(f"the pole stays up for {np.mean(scores):.0f} of {STEPS_MAX} steps")
    assert np.mean(scores) > 100


if __name__ == "__main__":
    main()
