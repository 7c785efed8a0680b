"""Reduction kernels for each operation and dtype, and codes of compressed arrays, without the GIL.
`cext/reduce_kernels.h` and `cext/reduce_codes.h` define the operations.

`op`: one of OPS. `dtype`: one of DTYPES, which are NumPy's names and "bfloat16" (16 bits in memory
order). A pair without a kernel raises ValueError.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

# Any buffer. Before Python 3.12, arrays do not declare the buffer protocol.
_Bytes: TypeAlias = Buffer | NDArray[Any]

# The names of operations and dtypes, by number.
OPS: tuple[str, ...]
DTYPES: tuple[str, ...]

def supported(op: str, dtype: str) -> bool: ...
def result_dtype(op: str, dtype: str) -> str: ...
def reduce_addresses(
    op: str,
    dtype: str,
    sources: Sequence[int],
    destination: int,
    count: int,
    threads: int = 1,
) -> None: ...
def reduce_buffers(
    op: str,
    dtype: str,
    sources: Sequence[_Bytes],
    destination: _Bytes,
    threads: int = 1,
) -> None: ...
def copy_address(destination: int, source: int, nbytes: int, threads: int = 1) -> None: ...
def order_mean(
    dtype: str, sources: Sequence[int], destination: int, count: int, low: int, high: int
) -> None: ...
def all_finite(dtype: str, source: int, count: int) -> bool: ...
def add_pairs(pairs: _Bytes, into: _Bytes, factor: float = 1.0) -> None: ...
def quantise(
    values: _Bytes, scales: _Bytes, codes: _Bytes, block: int, levels: int = 127
) -> None: ...
def add_quantised(
    codes: _Bytes, scales: _Bytes, into: _Bytes, block: int, factor: float = 1.0
) -> None: ...
