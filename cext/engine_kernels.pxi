# The engine's kernels and checksums, under their Python names.

cdef int number_in(tuple names, str name, str what) except -1:
    try:
        return names.index(name)
    except ValueError:
        raise ValueError(f"unknown {what} {name!r}; one of {', '.join(names)}") from None


cdef size_t item_bytes_of(str op, str dtype, bint accumulated, bint is_result) except 0:
    cdef size_t found = fold_item_bytes(number_in(OPS, op, "op"), number_in(DTYPES, dtype, "dtype"),
                                        accumulated, is_result)
    if not found:
        raise ValueError(f"no reduction kernel for {op!r} of {dtype!r}")
    return found


def accumulator_dtype(op: str, dtype: str) -> str:
    """The dtype of this reduction's partial results."""
    item_bytes_of(op, dtype, False, False)
    return DTYPES[fold_accumulator(number_in(OPS, op, "op"), number_in(DTYPES, dtype, "dtype"))]


def crc32c(data, crc: int = 0, way: str = "") -> int:
    """The checksum of blocks. `way`: "instruction" or "table", as on CPUs without carry-less
    products, or without a crc instruction."""
    cdef const unsigned char[::1] view = memoryview(data).cast("B")
    cdef size_t nbytes = view.shape[0]
    cdef uint32_t start = crc
    if nbytes == 0:
        return start
    if way == "table":
        return crc32c_by_table(start, &view[0], nbytes)
    if way == "instruction":
        return crc32c_by_instruction(start, &view[0], nbytes)
    return crc32c_c(start, &view[0], nbytes)
