"""How do I map a function over many items and show the progress?

`map` returns results in order while later ones are computed; `progress=` draws a bar in a terminal
or a notebook. With `ordered=False` results are returned as they are ready.

Needs: tqdm
(`pip install 'hoplite-mp[progress]'`)
"""

import math

import hoplite_mp

LIMIT, STEP = 200_000, 2_000


def primes_between(low, high):
    def is_prime(n):
        return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))

    return low, [n for n in range(low, high) if is_prime(n)]


def main():
    lows = range(0, LIMIT, STEP)
    highs = range(STEP, LIMIT + STEP, STEP)
    with hoplite_mp.Cluster() as c:
        found = []
        for _, primes in c.map(primes_between, lows, highs, progress="primes"):
            found += primes
        total = sum(len(primes) for _, primes in c.map(primes_between, lows, highs, ordered=False))
    print(f"{total} primes below {LIMIT}; the last one is {found[-1]}")
    assert found == sorted(found)
    assert total == len(found) == 17984


if __name__ == "__main__":
    main()
