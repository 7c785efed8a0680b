"""How do I process images while they are still being read, with bounded memory?

`stream` runs a generator in another process and returns a ref for each item; the generator pauses
while `buffersize` items are waiting. Each image is passed to a task as a ref, so it is never copied
to this process. Results are taken as they are ready.
"""

import numpy as np

import hoplite_mp

IMAGES, AHEAD = 40, 4
SHAPE = (480, 640, 3)


def read_images(count):
    """In place of a camera or a directory: noise with a bright square."""
    rng = np.random.default_rng(0)
    for number in range(count):
        image = hoplite_mp.current().empty(SHAPE, np.uint8)  # published without a copy
        image[:] = rng.integers(0, 100, SHAPE, np.uint8)
        y, x = rng.integers(0, 400, 2)
        image[y : y + 32, x : x + 32] = 255
        yield number, image, (int(y), int(x))


def find_square(item):
    number, image, truth = item
    bright = image.min(axis=2) > 200
    y, x = np.argwhere(bright).min(axis=0)
    return number, (int(y), int(x)) == truth


def main():
    with hoplite_mp.Cluster(workers=3) as c:
        images = c.options(buffersize=AHEAD).stream(read_images, IMAGES)
        working = hoplite_mp.as_completed([])
        right = []
        for asked, image in enumerate(images):
            working.add(c.submit(find_square, image))
            if asked >= AHEAD:  # limit the number of running tasks
                right.append(next(working).result())
        right += [one.result() for one in working]
        used = c.stats()["bytes_used"]
    print(f"{len(right)} images, {sum(good for _, good in right)} squares found")
    print(f"{used >> 20} MiB in use at the end, of {IMAGES * np.prod(SHAPE) >> 20} MiB in all")
    assert sorted(number for number, _ in right) == list(range(IMAGES))
    assert all(good for _, good in right)


if __name__ == "__main__":
    main()
