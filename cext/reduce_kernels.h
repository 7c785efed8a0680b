/* Element-wise reduction of n inputs into one output, in one pass over memory.
 *
 * Memory bandwidth limits a reduction of large arrays. Folding pair by pair, as
 * `functools.reduce(np.add, arrays)` does, moves 3 (n - 1) arrays; here n are read and 1 written.
 *
 * Method: the elements are cut into blocks that stay in the L1 cache. For each block
 *
 *     source 0 ──widen──► accumulator ──divide──► (mean only) ──narrow──► destination
 *     source 1 ──fold───►      │
 *       ...    ──fold───►      │   REDUCE_BLOCK_BYTES on the stack, aligned to a cache line
 *     source n-1 ─fold──►      │
 *
 * Each stage is a free function over primitive arguments; a table [dtype][op] names the stages. A
 * missing stage means that the bits are copied. Without measured gain, and so omitted: prefetching
 * the next block, writing the result around the caches.
 *
 * The meaning of the operations (as in NumPy unless said otherwise):
 *   - Inputs are folded from the left in the order given: float32 and float64 have the bits of
 *     NumPy's fold. No stage is contracted or reassociated, whatever the CPU.
 *   - Integers wrap. bool: any byte that is not 0 is true; sum, max, or = or; prod, min, and = and.
 *   - min(a, b) is `a < b or a is NaN ? a : b`, max(a, b) is `a > b or a is NaN ? a : b`:
 *     a NaN in any input is the result, and of two equal zeros the later input's sign stays.
 *   - float16 and bfloat16 are accumulated as float32 and rounded once, to nearest even.
 *   - mean is sum / inputs. Floats divide in their dtype (float16, bfloat16: as float32, before
 *     the rounding). Integers and bool are accumulated as float64 and give float64: no wrapping.
 *   - complex: sum and prod; prod is (ar br - ai bi, ar bi + ai br) with every step rounded, the
 *     same on every CPU (NumPy fuses a multiply and an add where the CPU can).
 *   - One input is copied (mean of integers: converted).
 */
#ifndef REDUCE_KERNELS_H
#define REDUCE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* The numbers and names of operators and dtypes, which Python reads from here. */
#define REDUCE_OPS(_)                                                                              \
    _(SUM, "sum") _(PROD, "prod") _(MIN, "min") _(MAX, "max") _(MEAN, "mean") _(AND, "and")        \
    _(OR, "or") _(XOR, "xor")
#define REDUCE_DTYPES(_)                                                                           \
    _(BOOL, "bool") _(INT8, "int8") _(INT16, "int16") _(INT32, "int32") _(INT64, "int64")          \
    _(UINT8, "uint8") _(UINT16, "uint16") _(UINT32, "uint32") _(UINT64, "uint64")                  \
    _(FLOAT16, "float16") _(BFLOAT16, "bfloat16") _(FLOAT32, "float32") _(FLOAT64, "float64")      \
    _(COMPLEX64, "complex64") _(COMPLEX128, "complex128")
#define REDUCE_NUMBER(name, text) REDUCE_##name,
#define REDUCE_NAME(name, text) text,
enum reduce_op { REDUCE_OPS(REDUCE_NUMBER) REDUCE_OP_COUNT };
enum reduce_dtype { REDUCE_DTYPES(REDUCE_NUMBER) REDUCE_DTYPE_COUNT };
static const char *const reduce_op_names[] = {REDUCE_OPS(REDUCE_NAME)};
static const char *const reduce_dtype_names[] = {REDUCE_DTYPES(REDUCE_NAME)};

enum {
    /* The accumulator of one block. With one block of a source, it fits into L1. */
    REDUCE_BLOCK_BYTES = 16 * 1024,
    /* The unit of work of a thread (bytes of the accumulator): whole blocks, so that a delayed
     * thread leaves the rest to the others. */
    REDUCE_CHUNK_BYTES = 16 * REDUCE_BLOCK_BYTES,
    /* One thread for each so many bytes read and written: starting a thread costs about 30 us, the
     * time of moving 300 KiB. */
    REDUCE_THREAD_BYTES_MIN = 2 * 1024 * 1024,
    REDUCE_THREADS_MAX = 64,
    REDUCE_LINE_BYTES = 64
};

/* widen: accumulator[i] = the value of source[i].  fold: accumulator[i] = op(accumulator[i],
 * source[i]).  divide: accumulator[i] /= inputs.  narrow: result[i] = accumulator[i], rounded.
 * The accumulator and the result block are aligned to a line, sources have any alignment. */
typedef void reduce_pair_fn(void *restrict accumulator, const void *restrict source, size_t units);
typedef void reduce_divide_fn(void *accumulator, size_t units, size_t inputs);

struct reduce_kernel {
    reduce_pair_fn *fold; /* NULL: the pair (dtype, op) is not supported */
    reduce_pair_fn *widen;
    reduce_divide_fn *divide;
    reduce_pair_fn *narrow;
    uint8_t source_bytes, accumulator_bytes, result_bytes; /* of one unit */
    uint8_t lanes; /* units in an element: 2 if both parts of a complex number are separate */
};

/* The kernel of a pair, or NULL: not supported. */
const struct reduce_kernel *reduce_kernel_find(int op, int dtype);

/* Bytes of an element of a source, and of the result. */
size_t reduce_source_bytes(const struct reduce_kernel *kernel);
size_t reduce_result_bytes(const struct reduce_kernel *kernel);

/* Reduces `inputs` >= 1 sources of `count` elements. The destination is disjoint from each source,
 * or has the same beginning and element size. Returns the number of threads used, including the
 * caller: fewer than requested if the work is small or the system refuses. They run with every
 * signal blocked, and have ended on return. */
int reduce_run(const struct reduce_kernel *kernel, const void *const *sources, size_t inputs,
               void *destination, size_t count, int threads);

/* memcpy by several threads; source and destination are disjoint or equal. */
int reduce_copy(void *destination, const void *source, size_t bytes, int threads);

_Static_assert(sizeof(float) == 4 && sizeof(double) == 8, "float32 and float64");
_Static_assert(REDUCE_BLOCK_BYTES % (16 * REDUCE_LINE_BYTES) == 0, "a block is whole lines");
_Static_assert(REDUCE_CHUNK_BYTES % REDUCE_BLOCK_BYTES == 0, "a chunk is whole blocks");

#endif
