"""How do many tasks read one large array without copying it?

`put` copies the array once into memory that all processes of the host share. Tasks take the ref as
an argument and get read-only views. An array made with `empty` is in the store from the start.
"""

import os

import numpy as np
import psutil

import hoplite_mp

ROWS, COLUMNS = 200_000, 32


def column_statistics(table, column):
    values = table[:, column]
    return column, values.mean(), values.std(), psutil.Process().memory_info().rss


def normalised(table, means, spreads):
    out = hoplite_mp.current().empty(table.shape)
    np.divide(table - means, spreads, out=out)
    return out


def main():
    table = np.random.default_rng(0).normal(3.0, 2.0, size=(ROWS, COLUMNS))
    with hoplite_mp.Cluster(workers=2) as c:
        ref = c.put(table)
        print(f"{ref!r}, put by process {os.getpid()}")
        found = list(c.map(column_statistics, [ref] * COLUMNS, range(COLUMNS)))
        means, spreads = np.array([row[1:3] for row in found]).T
        result = c.submit(normalised, ref, means, spreads)  # stays in the store
        check = c.submit(lambda x: (float(x.mean()), float(x.std())), result).result()
        print("mean and spread after it: {:.6f}, {:.6f}".format(*check))
        assert np.allclose(check, (0, 1), atol=1e-9)
        view = c.get(ref)
        assert not view.flags.writeable
        assert np.array_equal(view, table)


if __name__ == "__main__":
    main()
