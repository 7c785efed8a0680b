"""Training on shards of Fashion-MNIST whose models are averaged by gossip, or by allreduce."""

import time

import numpy as np

import hoplite_mp
from examples.applications import fashion_mnist, our_hosts
from examples.applications.running import arguments, say
from hoplite_mp import ml

HIDDEN, BATCH, LOCAL_STEPS, RATE = 100, 64, 4, 0.1
SHAPES = [
    (fashion_mnist.PIXELS, HIDDEN),
    (HIDDEN,),
    (HIDDEN, fashion_mnist.CLASSES),
    (fashion_mnist.CLASSES,),
]
EVERY_S = 0.5  # between two models that are kept
TEST_ROWS = 4000


def unpack(x):
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
    return [part.reshape(s) for part, s in zip(np.split(x, ends), SHAPES, strict=True)]


def forward(x, images):
    w1, b1, w2, b2 = unpack(x)
    hidden = np.maximum(images @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def step(x, images, labels):
    """One step of SGD, in place."""
    w2 = unpack(x)[2]
    hidden, scores = forward(x, images)
    scores -= scores.max(axis=1, keepdims=True)
    error = np.exp(scores)
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    back = (error @ w2.T) * (hidden > 0)
    parts = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
    x -= RATE * np.concatenate([one.ravel() for one in parts])


def averaging(way, group, deadline):
    """A function that mixes the model with the models of other ranks."""
    if way == "allreduce":
        return lambda x: group.allreduce(x, "mean")
    return ml.Gossip(group, deadline, way).mix


def train(rank, given, name):
    """(models with their times, rounds) of a rank."""
    images, labels = fashion_mnist.load("train")
    own = slice(rank, None, given.hosts)
    images, labels = images[own].astype(np.float32) / 255, labels[own]
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [(rng.normal(size=s) * 0.05 if len(s) > 1 else np.zeros(s)).ravel() for s in SHAPES]
    ).astype(np.float32)
    rng = np.random.default_rng([1, rank])
    kept, rounds = [], 0
    with hoplite_mp.current().group(name, given.hosts, rank) as group:
        mix = averaging(given.way, group, given.deadline)
        group.barrier()
        begun = time.monotonic()
        # All ranks end with the same call: the slowest one decides nothing.
        while group.allreduce(float(time.monotonic() - begun), "max") < given.seconds:
            for _ in range(LOCAL_STEPS):
                some = rng.choice(len(images), BATCH, replace=False)
                step(x, images[some], labels[some])
            x = mix(x)
            rounds += 1
            if rank == 0 and (not kept or time.monotonic() - begun - kept[-1][0] > EVERY_S):
                kept.append((time.monotonic() - begun, x.copy()))
    return kept, rounds


def main():
    given = arguments(tls=False, way="reliable", deadline=0.15, seconds=10.0)
    with our_hosts.connect(given) as c:
        view, name = c.options(resources={"place": 1}), f"gossip-{time.monotonic()}"
        say("begun")
        members = [view.submit(train, rank, given, name) for rank in range(given.hosts)]
        found = [member.result() for member in members]
        say("ended")
    images, labels = (one[:TEST_ROWS] for one in fashion_mnist.load("t10k"))
    images = images.astype(np.float32) / 255
    right = [(at, forward(x, images)[1].argmax(axis=1) == labels) for at, x in found[0][0]]
    curve = [(at, float(one.mean())) for at, one in right]
    say("result", curve=curve, rounds=found[0][1], bytes=int(x_bytes()))


def x_bytes():
    return 4 * sum(np.prod(shape) for shape in SHAPES)


if __name__ == "__main__":
    main()
