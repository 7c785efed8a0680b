"""How do agents on several processes learn together, and seldom communicate?

Each arm is a handwritten digit of scikit-learn, described by its principal components; the reward
is 1 if it is a zero. Four agents share what they learn through a server.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import hoplite_mp
from hoplite_mp import ml

FEATURES, ARMS, ROUNDS, AGENTS = 10, 5, 250, 4


def play(server, features, rewards, seed, alpha):
    """How often the agent has found a zero where there was one, its messages, and their bytes."""
    rng = np.random.default_rng(seed)
    agent = ml.FedLinUCB(features.shape[1], alpha, beta=0.1, server=server)
    found = possible = 0.0
    for _ in range(ROUNDS):
        shown = rng.choice(len(features), ARMS, replace=False)
        reward = rewards[shown[agent.choose(features[shown])]]
        agent.update(reward)
        found, possible = found + reward, possible + rewards[shown].max()
    return found, possible, agent.messages, agent.sent + agent.received


def main():
    digits, labels = load_digits(return_X_y=True)
    features = PCA(FEATURES, random_state=0).fit_transform(digits) / 10
    features = np.hstack([features, np.ones((len(features), 1))])
    rewards = (labels == 0).astype(float)
    with hoplite_mp.Cluster(workers=2) as c:
        for alpha in (0.0, 1.0):
            server = ml.FedLinUCB.serve(features.shape[1])
            agents = [
                c.submit(play, server, features, rewards, seed, alpha) for seed in range(AGENTS)
            ]
            found, possible, messages, moved = np.sum([one.result() for one in agents], axis=0)
            print(
                f"alpha {alpha:g}: {found:.0f} of {possible:.0f} zeros found, "
                f"{messages:.0f} messages, {moved:.0f} bytes"
            )


if __name__ == "__main__":
    main()
