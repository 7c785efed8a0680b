"""Fashion-MNIST from Debian's package: 70 000 pictures of clothes in ten classes."""

import gzip
from pathlib import Path

import numpy as np

FOLDER = Path("/usr/share/datasets/fashion-mnist")
PIXELS, CLASSES = 28 * 28, 10


def load(kind):
    """Images, one row of bytes each, and labels; `kind` is "train" or "t10k"."""
    if not FOLDER.exists():
        raise FileNotFoundError(f"no {FOLDER}: install it, apt install dataset-fashion-mnist")
    with gzip.open(FOLDER / f"{kind}-images-idx3-ubyte.gz") as images:
        pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, PIXELS)
    with gzip.open(FOLDER / f"{kind}-labels-idx1-ubyte.gz") as labels:
        return pixels, np.frombuffer(labels.read(), np.uint8, offset=8)
