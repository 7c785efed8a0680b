"""How do I keep faulty workers from spoiling a model?

Eight workers train a classifier of handwritten digits together. Three of them send gradients with a
flipped sign, five times too large, and one sends NaN in the second half. The mean of the gradients
follows them; the operators of `hoplite_mp.ml` do not.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import contextlib

import numpy as np
from sklearn.datasets import load_digits

import hoplite_mp
from hoplite_mp import ml

SIZE, STEPS, BATCH, LR, HIDDEN = 8, 200, 32, 0.8, 64
FIRST = 65 * HIDDEN  # weights of the first layer


def forward(weights, images):
    """The hidden layer, with a column of ones, and the scores of the ten digits."""
    hidden = np.maximum(images @ weights[:FIRST].reshape(65, HIDDEN), 0)
    hidden = np.hstack([hidden, np.ones((len(hidden), 1), np.float32)])
    return hidden, hidden @ weights[FIRST:].reshape(HIDDEN + 1, 10)


def gradient(weights, images, labels):
    """The gradient of the mean cross-entropy."""
    hidden, scores = forward(weights, images)
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True) * len(labels)
    chances[np.arange(len(labels)), labels] -= 1 / len(labels)
    second = weights[FIRST:].reshape(HIDDEN + 1, 10)[:-1]
    back = (chances @ second.T) * (hidden[:, :-1] > 0)
    return np.concatenate([(images.T @ back).ravel(), (hidden.T @ chances).ravel()])


def data():
    """Shuffled images with a column of ones, and their digits."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return np.hstack([images / 16, np.ones((len(images), 1))]).astype(np.float32)[order], (
        labels[order]
    )


@np.errstate(all="ignore")  # the mean overflows
def train(rank, name, faulty, digits):
    """Trains with this rank's shard; returns the accuracy on the test images."""
    images, labels = digits
    held, test = slice(1200, 1400), slice(1400, None)
    rng = np.random.default_rng(rank)
    start = np.random.default_rng(7).standard_normal(FIRST + (HIDDEN + 1) * 10)
    weights = (0.15 * start).astype(np.float32)
    with hoplite_mp.current().group(f"{name} {faulty}", SIZE, rank) as group:
        for step in range(STEPS):
            batch = rng.choice(np.arange(rank, 1200, SIZE), BATCH)
            grad = gradient(weights, images[batch], labels[batch]).astype(np.float32)
            if rank < faulty:
                grad = grad * np.nan if rank == 0 and step > STEPS // 2 else -5 * grad
            op = {"mean": "mean", "median": ml.Median(), "krum": ml.Krum(2)}.get(name)
            if op is None:  # judged by a gradient on images that no rank trains with
                op = ml.Score(gradient(weights, images[held], labels[held]), lr=LR)
            # If no gradient is accepted, all ranks leave out this step.
            with contextlib.suppress(hoplite_mp.ReduceError):
                weights -= LR * group.allreduce(grad, op=op)
    scores = np.nan_to_num(forward(weights, images[test])[1])
    return float((scores.argmax(axis=1) == labels[test]).mean())


if __name__ == "__main__":
    with hoplite_mp.Cluster(workers=SIZE) as c:
        digits = c.put(data())
        for name in ("mean", "median", "krum", "score"):
            found = [c.spmd(train, SIZE, name, n, digits)[-1].result() for n in (0, 3)]
            print(f"{name:8} accuracy {found[0]:.3f}, with three faulty workers {found[1]:.3f}")
