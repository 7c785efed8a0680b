"""The rate of the reduction kernels compared with the memory bandwidth.

The bound: n inputs of S bytes are read once and one output is written, (n + 1) S bytes in all.
memcpy moves M bytes per second, reads and writes counted together, so a reduction that touches
memory once should take about (n + 1) S / M. Rounds of memcpy and of the reduction alternate, with
the same number of threads, because the speed of shared memory varies over time.

    python benchmarks/bench_reduce_kernel.py [--mebibytes 64] [--inputs 8] [--rounds 7]

NumPy's `functools.reduce(np.add, arrays)` is measured for comparison.
"""

import argparse
import ctypes
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from hoplite_mp import _reduce

Array = np.ndarray[Any, Any]

CASES = [
    ("sum", "float32"),
    ("mean", "float32"),
    ("max", "float32"),
    ("sum", "float64"),
    ("sum", "float16"),
    ("mean", "float16"),
    ("sum", "bfloat16"),
    ("sum", "int8"),
    ("sum", "int64"),
    ("prod", "int32"),
    ("mean", "int32"),
    ("xor", "uint8"),
    ("sum", "complex64"),
    ("prod", "complex64"),
]
# The test that the numbers are held against: this share of the bound, for sum of float32.
SHARE_WANTED = 0.75


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turn(actions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Each action's shortest time in seconds, after a round that touches all the memory."""
    taken = [[seconds(action) for action in actions] for _ in range(rounds + 1)][1:]
    return [min(times) for times in zip(*taken, strict=True)]


class Memcpy:
    """libc's memcpy from one array to another, by several threads, each on its part."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self.call = ctypes.CDLL(None).memcpy
        self.call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.call.restype = ctypes.c_void_p
        self.origin, self.into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self.part = nbytes // threads
        self.bytes_moved = 2 * self.part * threads
        self.pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        into, origin = self.into.ctypes.data, self.origin.ctypes.data
        starts = range(0, self.bytes_moved // 2, self.part)
        wait([self.pool.submit(self.call, into + at, origin + at, self.part) for at in starts])


def ordinary_values(dtype: str, nbytes: int) -> Array:
    """Near one: neither subnormal nor infinite numbers, which CPUs treat apart."""
    if dtype == "bfloat16":
        near_one = np.full(nbytes // 4, 1.0078125, np.float32)
        return near_one.view(np.uint16)[1::2].repeat(2)
    return np.full(nbytes // np.dtype(dtype).itemsize, 1, dtype)


class Reduction:
    """One case, over inputs of its own: the same array n times would come from the cache."""

    def __init__(self, op: str, dtype: str, nbytes: int, inputs: int) -> None:
        self.op, self.dtype = op, dtype
        self.arrays = [ordinary_values(dtype, nbytes) for _ in range(inputs)]
        result_dtype = _reduce.result_dtype(op, dtype)
        item_bytes = 2 if result_dtype == "bfloat16" else np.dtype(result_dtype).itemsize
        self.result = np.zeros(self.arrays[0].size * item_bytes, np.uint8)
        self.bytes_moved = inputs * nbytes + self.result.nbytes

    def run(self, threads: int) -> None:
        _reduce.reduce_buffers(self.op, self.dtype, self.arrays, self.result, threads=threads)


def numpy_bytes_per_s(nbytes: int, inputs: int, rounds: int) -> float:
    """NumPy's fold, counted as if it moved no more than the kernel does."""
    arrays = [ordinary_values("float32", nbytes) for _ in range(inputs)]
    (fold_s,) = in_turn([lambda: functools.reduce(np.add, arrays)], rounds)
    return (inputs + 1) * nbytes / fold_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mebibytes", type=int, default=64, help="size of each input")
    parser.add_argument("--inputs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    nbytes, inputs, rounds = options.mebibytes << 20, options.inputs, options.rounds

    copies = [Memcpy(nbytes, threads) for threads in (1, 2)]
    fold_speed = numpy_bytes_per_s(nbytes, inputs, rounds)
    print(f"{inputs} inputs of {options.mebibytes} MiB; GB/s read and written, best of {rounds}")
    print(f"NumPy's fold of float32: {fold_speed / 1e9:.2f}\n")
    print("                     1 thread                     2 threads")
    print("op   dtype        memcpy   kernel  of bound    memcpy   kernel  of bound")
    for op, dtype in CASES:
        case = Reduction(op, dtype, nbytes, inputs)
        runs = [functools.partial(case.run, threads) for threads in (1, 2)]
        copy_1, copy_2, run_1, run_2 = in_turn([*copies, *runs], rounds)
        line = f"{op:4} {dtype:10}"
        for copy, copy_s, run_s in [(copies[0], copy_1, run_1), (copies[1], copy_2, run_2)]:
            memory, kernel = copy.bytes_moved / copy_s, case.bytes_moved / run_s
            share = kernel / memory
            line += f"  {memory / 1e9:7.2f}  {kernel / 1e9:7.2f}  {share:8.2f}"
        print(line)
        if (op, dtype) == CASES[0]:
            verdict = "holds" if share >= SHARE_WANTED else "FAILS"
            print(f"     at least {SHARE_WANTED} of the bound with 2 threads: {verdict}")


if __name__ == "__main__":
    main()
