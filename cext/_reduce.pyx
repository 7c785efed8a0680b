"""Reduction kernels for Python: takes names, addresses and buffers; C loops run without the GIL.

`reduce_kernels.h` and `reduce_codes.h` define the operations. This file translates names into the
numbers of these headers, checks what C cannot check, and releases the GIL while a kernel runs.

It imports neither hoplite_mp nor NumPy, and raises only builtin errors.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport INT64_MAX, int8_t, uintptr_t


cdef extern from "reduce_kernels.h" nogil:
    enum:
        REDUCE_OP_COUNT
        REDUCE_DTYPE_COUNT

    const char *reduce_op_names[]
    const char *reduce_dtype_names[]

    struct reduce_kernel:
        pass

    const reduce_kernel *reduce_kernel_find(int op, int dtype)
    size_t reduce_source_bytes(const reduce_kernel *kernel)
    size_t reduce_result_bytes(const reduce_kernel *kernel)
    int reduce_run(const reduce_kernel *kernel, const void *const *sources, size_t inputs,
                   void *destination, size_t count, int threads)
    int reduce_copy(void *destination, const void *source, size_t nbytes, int threads)


cdef extern from "reduce_order.h" nogil:
    enum:
        ORDER_INPUTS_MAX

    int reduce_order_mean(int is_double, const void *const *sources, size_t inputs, size_t count,
                          size_t low, size_t high, void *result)
    int reduce_all_finite(int is_double, const void *source, size_t count)


cdef extern from "reduce_codes.h" nogil:
    enum:
        CODES_PAIR_BYTES
        CODES_LEVELS_MAX

    size_t codes_first_outside(const void *source, size_t pairs, size_t count)
    void codes_add_pairs(const void *source, size_t pairs, void *into, float factor)
    void codes_quantise(const void *source, size_t count, size_t block, int levels, void *scales,
                        int8_t *codes)
    void codes_add_quantised(const int8_t *codes, const void *scales, size_t count, size_t block,
                             void *into, float factor)


OPS = tuple([reduce_op_names[i].decode() for i in range(REDUCE_OP_COUNT)])
DTYPES = tuple([reduce_dtype_names[i].decode() for i in range(REDUCE_DTYPE_COUNT)])
cdef dict op_numbers = {name: number for number, name in enumerate(OPS)}
cdef dict dtype_numbers = {name: number for number, name in enumerate(DTYPES)}


cdef const reduce_kernel *find(str op, str dtype):
    return reduce_kernel_find(op_numbers.get(op, -1), dtype_numbers.get(dtype, -1))


cdef const reduce_kernel *need(str op, str dtype) except NULL:
    cdef const reduce_kernel *kernel = find(op, dtype)
    if kernel == NULL:
        raise ValueError(f"no reduction kernel for {op!r} of {dtype!r}; ask supported() first")
    return kernel


cdef int check_threads(int threads) except -1:
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return 0


cdef int check_place(uintptr_t source, size_t source_bytes,
                     uintptr_t destination, size_t destination_bytes) except -1:
    """The two ranges may be equal or disjoint. With any other overlap, reads would find written
    results."""
    if source == 0 or destination == 0:
        raise ValueError("address 0 of a non-empty range")
    if source == destination and source_bytes == destination_bytes:
        return 0
    if source < destination + destination_bytes and destination < source + source_bytes:
        raise ValueError(
            f"destination [{destination:#x}, +{destination_bytes}) overlaps "
            f"source [{source:#x}, +{source_bytes}) without being the same"
        )
    return 0


cdef int run(const reduce_kernel *kernel, const uintptr_t *sources, size_t inputs,
             uintptr_t destination, size_t count, int threads) except -1:
    cdef size_t i
    cdef int used
    if count == 0:
        return 1
    for i in range(inputs):
        check_place(sources[i], count * reduce_source_bytes(kernel),
                    destination, count * reduce_result_bytes(kernel))
    with nogil:
        used = reduce_run(kernel, <const void *const *> sources, inputs,
                          <void *> destination, count, threads)
    return used


def supported(op: str, dtype: str) -> bool:
    """Whether a kernel exists for this operation on this NumPy dtype name."""
    return find(op, dtype) != NULL


def result_dtype(op: str, dtype: str) -> str:
    """The result's dtype name: `dtype`, but "float64" for the mean of integers and bool."""
    need(op, dtype)
    if op == "mean" and (dtype == "bool" or "int" in dtype):
        return "float64"
    return dtype


def reduce_addresses(
    op: str, dtype: str, sources, destination: int, count: int, threads: int = 1
) -> None:
    """Reduces `count` elements at each address of `sources` into `destination`, without the GIL.

    Any alignment is allowed. The destination is disjoint from every source, or equal to one.
    """
    cdef const reduce_kernel *kernel = need(op, dtype)
    cdef size_t inputs = len(sources)
    cdef size_t i
    check_threads(threads)
    if inputs == 0:
        raise ValueError("a reduction needs at least one source")
    if not 0 <= count <= INT64_MAX // 16:  # an element has at most 16 bytes
        raise ValueError(f"count must be from 0 to {INT64_MAX // 16}, not {count}")
    cdef uintptr_t *addresses = <uintptr_t *> PyMem_Calloc(inputs, sizeof(uintptr_t))
    if addresses == NULL:
        raise MemoryError
    try:
        for i in range(inputs):
            addresses[i] = sources[i]
        run(kernel, addresses, inputs, destination, count, threads)
    finally:
        PyMem_Free(addresses)


def reduce_buffers(op: str, dtype: str, sources, destination, threads: int = 1) -> None:
    """Reduces contiguous buffers of equal size into a writable one, without the GIL."""
    cdef const reduce_kernel *kernel = need(op, dtype)
    cdef size_t inputs = len(sources)
    cdef size_t held = 0
    cdef size_t i
    check_threads(threads)
    if inputs == 0:
        raise ValueError("a reduction needs at least one source")
    # The last view is the destination's.
    cdef Py_buffer *views = <Py_buffer *> PyMem_Calloc(inputs + 1, sizeof(Py_buffer))
    cdef uintptr_t *addresses = <uintptr_t *> PyMem_Calloc(inputs, sizeof(uintptr_t))
    try:
        if views == NULL or addresses == NULL:
            raise MemoryError
        for i in range(inputs):
            PyObject_GetBuffer(sources[i], &views[i], PyBUF_SIMPLE)
            held += 1
            addresses[i] = <uintptr_t> views[i].buf
        PyObject_GetBuffer(destination, &views[inputs], PyBUF_WRITABLE)
        held += 1
        run(kernel, addresses, inputs, <uintptr_t> views[inputs].buf,
            count_elements(kernel, dtype, views, inputs), threads)
    finally:
        for i in range(held):
            PyBuffer_Release(&views[i])
        PyMem_Free(views)
        PyMem_Free(addresses)


cdef Py_ssize_t count_elements(const reduce_kernel *kernel, str dtype,
                               const Py_buffer *views, size_t inputs) except -1:
    """The number of elements of each source; checks that all sizes agree."""
    cdef size_t nbytes = views[0].len
    cdef size_t item_bytes = reduce_source_bytes(kernel)
    cdef size_t i
    for i in range(1, inputs):
        if <size_t> views[i].len != nbytes:
            raise ValueError(f"source {i} has {views[i].len} bytes, source 0 has {nbytes}")
    if nbytes % item_bytes:
        raise ValueError(
            f"{nbytes} bytes are not a whole number of {dtype} ({item_bytes} bytes each)"
        )
    cdef size_t result_bytes = nbytes // item_bytes * reduce_result_bytes(kernel)
    if <size_t> views[inputs].len != result_bytes:
        raise ValueError(
            f"destination has {views[inputs].len} bytes, the result has {result_bytes}"
        )
    return nbytes // item_bytes


def copy_address(destination: int, source: int, nbytes: int, threads: int = 1) -> None:
    """Copies memory with several threads, without the GIL."""
    cdef uintptr_t into = destination
    cdef uintptr_t origin = source
    cdef size_t size
    cdef int thread_count = threads
    check_threads(thread_count)
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative: {nbytes}")
    size = nbytes
    if size == 0:
        return
    check_place(origin, size, into, size)
    with nogil:
        reduce_copy(<void *> into, <const void *> origin, size, thread_count)


cdef int is_double_name(str dtype) except -1:
    if dtype not in ("float32", "float64"):
        raise ValueError(f"order statistics need float32 or float64, not {dtype!r}")
    return dtype == "float64"


def order_mean(dtype: str, sources, destination: int, count: int, low: int, high: int) -> None:
    """Mean of the sorted values low to high - 1 of each coordinate, without the GIL.

    A NaN sorts after every number. The destination overlaps no source.
    """
    cdef int is_double = is_double_name(dtype)
    cdef size_t inputs = len(sources)
    cdef size_t item = 8 if is_double else 4
    cdef size_t i, size, begin, end
    cdef uintptr_t into = destination
    cdef int failed
    if not 0 < inputs <= ORDER_INPUTS_MAX:
        raise ValueError(f"order statistics need 1 to {ORDER_INPUTS_MAX} sources, not {inputs}")
    if not 0 <= low < high <= inputs:
        raise ValueError(f"values {low} to {high} of {inputs}: not 0 <= low < high <= sources")
    if not 0 <= count <= INT64_MAX // 16:
        raise ValueError(f"count must be from 0 to {INT64_MAX // 16}, not {count}")
    if count == 0:
        return
    size, begin, end = count, low, high
    cdef uintptr_t *addresses = <uintptr_t *> PyMem_Calloc(inputs, sizeof(uintptr_t))
    if addresses == NULL:
        raise MemoryError
    try:
        for i in range(inputs):
            addresses[i] = sources[i]
            check_place(addresses[i], size * item, into, size * item)
            if addresses[i] == into:
                raise ValueError("the destination overlaps a source")
        with nogil:
            failed = reduce_order_mean(is_double, <const void *const *> addresses, inputs, size,
                                       begin, end, <void *> into)
        if failed:
            raise MemoryError
    finally:
        PyMem_Free(addresses)


def all_finite(dtype: str, source: int, count: int) -> bool:
    """Whether no element is NaN or infinite, without the GIL."""
    cdef int is_double = is_double_name(dtype)
    cdef uintptr_t address = source
    cdef size_t size
    cdef int finite
    if not 0 <= count <= INT64_MAX // 16:
        raise ValueError(f"count must be from 0 to {INT64_MAX // 16}, not {count}")
    if count == 0:
        return True
    if address == 0:
        raise ValueError("address 0 of a non-empty range")
    size = count
    with nogil:
        finite = reduce_all_finite(is_double, <const void *> address, size)
    return finite != 0


cdef class _HeldBuffer:
    """The memory of a contiguous buffer, held while this object lives."""

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, source, int flags = PyBUF_SIMPLE):
        PyObject_GetBuffer(source, &self.view, flags)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    cdef size_t count(self, size_t item_bytes, str name) except? 0:
        """The number of its items."""
        if <size_t> self.view.len % item_bytes:
            raise ValueError(
                f"{name} has {self.view.len} bytes, not a whole number of {item_bytes} bytes each"
            )
        return <size_t> self.view.len // item_bytes


def add_pairs(pairs, into, factor: float = 1.0) -> None:
    """into[index] += factor * value for each (uint32 index, float32 value), without the GIL.

    into: float32. If an index is out of range, raises ValueError and adds nothing.
    """
    cdef _HeldBuffer source = _HeldBuffer(pairs)
    cdef _HeldBuffer target = _HeldBuffer(into, PyBUF_WRITABLE)
    cdef size_t number = source.count(CODES_PAIR_BYTES, "pairs")
    cdef size_t size = target.count(sizeof(float), "into")
    cdef float times = factor
    cdef size_t outside
    with nogil:
        outside = codes_first_outside(source.view.buf, number, size)
        if outside == number:
            codes_add_pairs(source.view.buf, number, target.view.buf, times)
    if outside != number:
        raise ValueError(f"pair {outside} of {number} has an index not below {size}")


cdef int check_blocks(size_t block, size_t count, _HeldBuffer scales, _HeldBuffer codes) except -1:
    """Checks the sizes of scales and codes for `count` elements in such blocks."""
    cdef size_t blocks = 0
    if block < 1:
        raise ValueError("block must be at least 1")
    blocks = count // block + (count % block != 0)
    if scales.count(sizeof(float), "scales") != blocks or codes.count(1, "codes") != count:
        raise ValueError(
            f"{count} elements have {blocks} scales of 4 bytes and {count} codes, "
            f"not {scales.view.len} and {codes.view.len} bytes"
        )
    return 0


def quantise(values, scales, codes, block: int, levels: int = CODES_LEVELS_MAX) -> None:
    """Fills `scales` (float32, one for each block) and `codes` (int8), without the GIL."""
    cdef _HeldBuffer source = _HeldBuffer(values)
    cdef _HeldBuffer scale = _HeldBuffer(scales, PyBUF_WRITABLE)
    cdef _HeldBuffer code = _HeldBuffer(codes, PyBUF_WRITABLE)
    cdef size_t count = source.count(sizeof(float), "values")
    cdef size_t width = block
    cdef int most = levels
    if not 1 <= most <= CODES_LEVELS_MAX:
        raise ValueError(f"levels must be from 1 to {CODES_LEVELS_MAX}, not {most}")
    check_blocks(width, count, scale, code)
    with nogil:
        codes_quantise(source.view.buf, count, width, most, scale.view.buf,
                       <int8_t *> code.view.buf)


def add_quantised(codes, scales, into, block: int, factor: float = 1.0) -> None:
    """into[i] += factor * (scale of the block * codes[i]), into float32, without the GIL."""
    cdef _HeldBuffer code = _HeldBuffer(codes)
    cdef _HeldBuffer scale = _HeldBuffer(scales)
    cdef _HeldBuffer target = _HeldBuffer(into, PyBUF_WRITABLE)
    cdef size_t count = target.count(sizeof(float), "into")
    cdef size_t width = block
    cdef float times = factor
    check_blocks(width, count, scale, code)
    with nogil:
        codes_add_quantised(<const int8_t *> code.view.buf, scale.view.buf, count, width,
                            target.view.buf, times)
