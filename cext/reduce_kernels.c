/* The kernels of reduce_kernels.h, their table, and the threads that run them.
 *
 * The header defines each operation. This file has four parts: compiler settings for vectors; the
 * stages, one macro line each; the table; blocks and threads.
 *
 * It allocates nothing, and has no state between calls.
 */
#include "reduce_kernels.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

/* ---- Vectors --------------------------------------------------------------------------------
 * Plain loops, which the compiler turns into vectors. gcc on x86-64 with glibc compiles each stage
 * three times and chooses at load time; elsewhere (musl has no ifunc) there is one version.
 * Sanitizers instrument the choosing code, which runs before they are ready: one version too. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC optimize("O3", "fp-contract=off", "no-trapping-math")
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(REDUCE_ONE_VERSION)
#define STAGE static __attribute__((target_clones("avx512f", "avx2", "default"), noinline)) void
/* gcc 12 fuses a - and + with multiplications even where that is forbidden. These two versions have
 * no instruction for it. */
#define STAGE_UNFUSED static __attribute__((target_clones("avx2", "default"), noinline)) void
#if __GNUC__ >= 11 /* __builtin_cpu_supports knows "f16c" */
#include <immintrin.h>
#define HAVE_F16C 1
#endif
#endif
#elif defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif
#ifndef STAGE
#define STAGE static void
#define STAGE_UNFUSED static void
#endif
#ifdef __FAST_MATH__
#error "the results are promised to the bit: build without -ffast-math"
#endif

/* Types with any alignment that may alias anything. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef uint8_t u8 ANYWHERE;
typedef uint16_t u16 ANYWHERE;
typedef uint32_t u32 ANYWHERE;
typedef uint64_t u64 ANYWHERE;
typedef int8_t i8 ANYWHERE;
typedef int16_t i16 ANYWHERE;
typedef int32_t i32 ANYWHERE;
typedef int64_t i64 ANYWHERE;
typedef float f32 ANYWHERE;
typedef double f64 ANYWHERE;
/* Of the names below, only the loads differ from u8 and u16. */
typedef uint8_t b8 ANYWHERE;
typedef uint16_t f16 ANYWHERE;
typedef uint16_t bf16 ANYWHERE;

/* ---- Half precision -------------------------------------------------------------------------
 * Without branches, so that it vectorises on CPUs without conversion instructions. */
static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The exponent moves from bias 15 to bias 127. A subnormal half m * 2^-24 is read as the mantissa
 * of 2^-14, from which 2^-14 is subtracted: exact, and without subnormal floats. */
static inline float float_of_f16(uint16_t half) {
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    const uint32_t least_normal = (uint32_t)1 << 23, infinity = (uint32_t)31 << 23;
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t below = least_normal + rebias; /* 2^-14 as a float */
    const uint32_t subnormal = bits_of(float_of(magnitude + below) - float_of(below));
    const uint32_t finite = magnitude < least_normal ? subnormal : magnitude + rebias;
    return float_of(sign | (magnitude < infinity ? finite : magnitude + 2 * rebias));
}

/* Normal: adds half a unit of the last kept place, less one bit if that place is even. Below 2^-14:
 * adds to 0.5, whose last place is 2^-24, so that the addition itself rounds. */
static inline uint16_t f16_of_float(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t rebias = (uint32_t)(127 - 15) << 23, infinity = (uint32_t)255 << 23;
    const uint32_t least_normal = (uint32_t)113 << 23, overflow = (uint32_t)143 << 23;
    const uint32_t half = (uint32_t)126 << 23; /* 0.5 */
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(half)) - half;
    const uint32_t normal = (magnitude - rebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t finite = magnitude < least_normal ? subnormal : normal;
    const uint32_t special = magnitude > infinity ? 0x7e00 : 0x7c00;
    return (uint16_t)((bits >> 16 & 0x8000) | (magnitude < overflow ? finite : special));
}

static inline float float_of_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t bf16_of_float(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet = bits >> 16 | 0x40; /* a NaN must stay a NaN without its low bits */
    return (uint16_t)((bits & 0x7fffffff) > ((uint32_t)255 << 23) ? quiet : rounded);
}

/* ---- Stages ---------------------------------------------------------------------------------
 * `a` is the accumulator's value, `b` the source's. Arithmetic of integers is unsigned, and at
 * least 32 bits wide: nothing here can overflow a signed type. */
#define VALUE(x) (x)
#define TRUTH(x) ((x) != 0)
#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
#define PROD_NARROW(a, b) ((uint32_t)(a) * (uint32_t)(b))
#define MIN(a, b) ((b) < (a) ? (b) : (a))
#define MAX(a, b) ((b) > (a) ? (b) : (a))
#define MIN_NAN(a, b) (((a) < (b)) | ((a) != (a)) ? (a) : (b))
#define MAX_NAN(a, b) (((a) > (b)) | ((a) != (a)) ? (a) : (b))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
#define EITHER(a, b) (TRUTH(a) | TRUTH(b))
#define BOTH(a, b) (TRUTH(a) & TRUTH(b))
#define DIFFERENT(a, b) (TRUTH(a) ^ TRUTH(b))

#define ALIGNED(pointer) __builtin_assume_aligned(pointer, REDUCE_LINE_BYTES)

#define FOLD(name, A, S, LOAD, OP)                                                                \
    STAGE name(void *restrict accumulator, const void *restrict source, size_t units) {           \
        A *restrict into = ALIGNED(accumulator);                                                  \
        const S *restrict from = source;                                                          \
        for (size_t i = 0; i < units; i++) {                                                      \
            const A a = into[i];                                                                  \
            const __typeof__(LOAD(from[i])) b = LOAD(from[i]);                                    \
            into[i] = (A)(OP(a, b));                                                              \
        }                                                                                         \
    }

#define CONVERT(name, A, S, LOAD)                                                                 \
    STAGE name(void *restrict accumulator, const void *restrict source, size_t units) {           \
        A *restrict into = ALIGNED(accumulator);                                                  \
        const S *restrict from = source;                                                          \
        for (size_t i = 0; i < units; i++) into[i] = (A)LOAD(from[i]);                            \
    }

#define DIVIDE(name, A)                                                                           \
    STAGE name(void *accumulator, size_t units, size_t inputs) {                                  \
        A *into = ALIGNED(accumulator);                                                           \
        const A divisor = (A)inputs;                                                              \
        for (size_t i = 0; i < units; i++) into[i] /= divisor;                                    \
    }

/* Integers: the sign matters only for min, max and the mean. */
#define UNSIGNED_STAGES(T, TIMES)                                                                 \
    FOLD(sum_##T, T, T, VALUE, SUM)                                                               \
    FOLD(prod_##T, T, T, VALUE, TIMES)                                                            \
    FOLD(and_##T, T, T, VALUE, AND)                                                               \
    FOLD(or_##T, T, T, VALUE, OR)                                                                 \
    FOLD(xor_##T, T, T, VALUE, XOR)
#define ORDERED_STAGES(T, LEAST, MOST)                                                            \
    FOLD(min_##T, T, T, VALUE, LEAST)                                                             \
    FOLD(max_##T, T, T, VALUE, MOST)
#define AS_F64_STAGES(T, LOAD)                                                                    \
    FOLD(sum_f64_##T, f64, T, LOAD, SUM)                                                          \
    CONVERT(f64_of_##T, f64, T, LOAD)

UNSIGNED_STAGES(u8, PROD_NARROW)
UNSIGNED_STAGES(u16, PROD_NARROW)
UNSIGNED_STAGES(u32, PROD)
UNSIGNED_STAGES(u64, PROD)

ORDERED_STAGES(u8, MIN, MAX)
ORDERED_STAGES(u16, MIN, MAX)
ORDERED_STAGES(u32, MIN, MAX)
ORDERED_STAGES(u64, MIN, MAX)
ORDERED_STAGES(i8, MIN, MAX)
ORDERED_STAGES(i16, MIN, MAX)
ORDERED_STAGES(i32, MIN, MAX)
ORDERED_STAGES(i64, MIN, MAX)
ORDERED_STAGES(f32, MIN_NAN, MAX_NAN)
ORDERED_STAGES(f64, MIN_NAN, MAX_NAN)

AS_F64_STAGES(b8, TRUTH)
AS_F64_STAGES(u8, VALUE)
AS_F64_STAGES(u16, VALUE)
AS_F64_STAGES(u32, VALUE)
AS_F64_STAGES(u64, VALUE)
AS_F64_STAGES(i8, VALUE)
AS_F64_STAGES(i16, VALUE)
AS_F64_STAGES(i32, VALUE)
AS_F64_STAGES(i64, VALUE)

FOLD(either_b8, b8, b8, VALUE, EITHER)
FOLD(both_b8, b8, b8, VALUE, BOTH)
FOLD(different_b8, b8, b8, VALUE, DIFFERENT)

FOLD(sum_f32, f32, f32, VALUE, SUM)
FOLD(sum_f64, f64, f64, VALUE, SUM)
FOLD(prod_f32, f32, f32, VALUE, PROD)
FOLD(prod_f64, f64, f64, VALUE, PROD)
DIVIDE(divide_f32, f32)
DIVIDE(divide_f64, f64)

FOLD(sum_bf16, f32, bf16, float_of_bf16, SUM)
FOLD(prod_bf16, f32, bf16, float_of_bf16, PROD)
FOLD(min_bf16, f32, bf16, float_of_bf16, MIN_NAN)
FOLD(max_bf16, f32, bf16, float_of_bf16, MAX_NAN)
CONVERT(f32_of_bf16, f32, bf16, float_of_bf16)
CONVERT(bf16_of_f32, bf16, f32, bf16_of_float)

#ifndef HAVE_F16C
CONVERT(f32_of_f16, f32, f16, float_of_f16)
CONVERT(f16_of_f32, f16, f32, f16_of_float)
#else
/* If the CPU converts, a float16 reduction is twice as fast, with the same bits. */
CONVERT(f32_of_f16_plain, f32, f16, float_of_f16)
CONVERT(f16_of_f32_plain, f16, f32, f16_of_float)

static __attribute__((target("avx,f16c"))) void f32_of_f16_by_cpu(float *into, const f16 *from,
                                                                  size_t units) {
    size_t i = 0;
    for (; i + 8 <= units; i += 8)
        _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < units; i++) into[i] = float_of_f16(from[i]);
}

static __attribute__((target("avx,f16c"))) void f16_of_f32_by_cpu(f16 *into, const float *from,
                                                                  size_t units) {
    const int nearest_even = 0;
    size_t i = 0;
    for (; i + 8 <= units; i += 8)
        _mm_storeu_si128((__m128i *)(into + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), nearest_even));
    for (; i < units; i++) into[i] = f16_of_float(from[i]);
}

static void f32_of_f16(void *restrict accumulator, const void *restrict source, size_t units) {
    if (__builtin_cpu_supports("f16c"))
        f32_of_f16_by_cpu(accumulator, source, units);
    else
        f32_of_f16_plain(accumulator, source, units);
}

static void f16_of_f32(void *restrict result, const void *restrict accumulator, size_t units) {
    if (__builtin_cpu_supports("f16c"))
        f16_of_f32_by_cpu(result, accumulator, units);
    else
        f16_of_f32_plain(result, accumulator, units);
}
#endif

/* float16 is widened in pieces and folded as float32. */
static inline void fold_f16(reduce_pair_fn *fold, float *accumulator, const f16 *source,
                            size_t units) {
    enum { PIECE = 1024 };
    _Alignas(REDUCE_LINE_BYTES) float widened[PIECE];
    for (size_t at = 0; at < units; at += PIECE) {
        const size_t piece = units - at < PIECE ? units - at : PIECE;
        f32_of_f16(widened, source + at, piece);
        fold(accumulator + at, widened, piece);
    }
}
#define FOLD_F16(name, fold)                                                                      \
    static void name(void *restrict accumulator, const void *restrict source, size_t units) {     \
        fold_f16(fold, accumulator, source, units);                                               \
    }

FOLD_F16(sum_f16, sum_f32)
FOLD_F16(prod_f16, prod_f32)
FOLD_F16(min_f16, min_f32)
FOLD_F16(max_f16, max_f32)

#define COMPLEX_PROD(name, T)                                                                     \
    STAGE_UNFUSED name(void *restrict accumulator, const void *restrict source, size_t units) {   \
        T *restrict into = ALIGNED(accumulator);                                                  \
        const T *restrict from = source;                                                          \
        for (size_t i = 0; i < 2 * units; i += 2) {                                               \
            const T re = into[i], im = into[i + 1];                                               \
            into[i] = re * from[i] - im * from[i + 1];                                            \
            into[i + 1] = re * from[i + 1] + im * from[i];                                        \
        }                                                                                         \
    }

COMPLEX_PROD(prod_c64, f32)
COMPLEX_PROD(prod_c128, f64)

/* ---- The table ------------------------------------------------------------------------------ */
#define KERNEL(fold, widen, divide, narrow, source, accumulator, result, lanes)                   \
    { fold, widen, divide, narrow, source, accumulator, result, lanes }
#define SAME(fold, bytes) KERNEL(fold, NULL, NULL, NULL, bytes, bytes, bytes, 1)
#define MEAN_F64(T)                                                                               \
    KERNEL(sum_f64_##T, f64_of_##T, divide_f64, NULL, sizeof(T), sizeof(f64), sizeof(f64), 1)
#define MEAN_SAME(T)                                                                              \
    KERNEL(sum_##T, NULL, divide_##T, NULL, sizeof(T), sizeof(T), sizeof(T), 1)
#define HALF(op, T, divide)                                                                       \
    KERNEL(op##_##T, f32_of_##T, divide, T##_of_f32, sizeof(T), sizeof(f32), sizeof(T), 1)

#define INTEGER_ROW(U, T)                                                                         \
    {                                                                                             \
        [REDUCE_SUM] = SAME(sum_##U, sizeof(T)), [REDUCE_PROD] = SAME(prod_##U, sizeof(T)),       \
        [REDUCE_MIN] = SAME(min_##T, sizeof(T)), [REDUCE_MAX] = SAME(max_##T, sizeof(T)),         \
        [REDUCE_AND] = SAME(and_##U, sizeof(T)), [REDUCE_OR] = SAME(or_##U, sizeof(T)),           \
        [REDUCE_XOR] = SAME(xor_##U, sizeof(T)), [REDUCE_MEAN] = MEAN_F64(T),                     \
    }
#define FLOAT_ROW(T)                                                                              \
    {                                                                                             \
        [REDUCE_SUM] = SAME(sum_##T, sizeof(T)), [REDUCE_PROD] = SAME(prod_##T, sizeof(T)),       \
        [REDUCE_MIN] = SAME(min_##T, sizeof(T)), [REDUCE_MAX] = SAME(max_##T, sizeof(T)),         \
        [REDUCE_MEAN] = MEAN_SAME(T),                                                             \
    }
#define HALF_ROW(T)                                                                               \
    {                                                                                             \
        [REDUCE_SUM] = HALF(sum, T, NULL), [REDUCE_PROD] = HALF(prod, T, NULL),                   \
        [REDUCE_MIN] = HALF(min, T, NULL), [REDUCE_MAX] = HALF(max, T, NULL),                     \
        [REDUCE_MEAN] = HALF(sum, T, divide_f32),                                                 \
    }
#define COMPLEX_ROW(C, T)                                                                         \
    {                                                                                             \
        [REDUCE_SUM] = KERNEL(sum_##T, NULL, NULL, NULL, sizeof(T), sizeof(T), sizeof(T), 2),     \
        [REDUCE_PROD] = SAME(prod_##C, 2 * sizeof(T)),                                            \
    }

static const struct reduce_kernel kernels[REDUCE_DTYPE_COUNT][REDUCE_OP_COUNT] = {
    [REDUCE_BOOL] =
        {
            [REDUCE_SUM] = SAME(either_b8, 1),
            [REDUCE_PROD] = SAME(both_b8, 1),
            [REDUCE_MIN] = SAME(both_b8, 1),
            [REDUCE_MAX] = SAME(either_b8, 1),
            [REDUCE_MEAN] = MEAN_F64(b8),
            [REDUCE_AND] = SAME(both_b8, 1),
            [REDUCE_OR] = SAME(either_b8, 1),
            [REDUCE_XOR] = SAME(different_b8, 1),
        },
    [REDUCE_INT8] = INTEGER_ROW(u8, i8),
    [REDUCE_INT16] = INTEGER_ROW(u16, i16),
    [REDUCE_INT32] = INTEGER_ROW(u32, i32),
    [REDUCE_INT64] = INTEGER_ROW(u64, i64),
    [REDUCE_UINT8] = INTEGER_ROW(u8, u8),
    [REDUCE_UINT16] = INTEGER_ROW(u16, u16),
    [REDUCE_UINT32] = INTEGER_ROW(u32, u32),
    [REDUCE_UINT64] = INTEGER_ROW(u64, u64),
    [REDUCE_FLOAT16] = HALF_ROW(f16),
    [REDUCE_BFLOAT16] = HALF_ROW(bf16),
    [REDUCE_FLOAT32] = FLOAT_ROW(f32),
    [REDUCE_FLOAT64] = FLOAT_ROW(f64),
    [REDUCE_COMPLEX64] = COMPLEX_ROW(c64, f32),
    [REDUCE_COMPLEX128] = COMPLEX_ROW(c128, f64),
};

const struct reduce_kernel *reduce_kernel_find(int op, int dtype) {
    if (op < 0 || op >= REDUCE_OP_COUNT || dtype < 0 || dtype >= REDUCE_DTYPE_COUNT) return NULL;
    const struct reduce_kernel *kernel = &kernels[dtype][op];
    return kernel->fold ? kernel : NULL;
}

size_t reduce_source_bytes(const struct reduce_kernel *kernel) {
    return (size_t)kernel->source_bytes * kernel->lanes;
}

size_t reduce_result_bytes(const struct reduce_kernel *kernel) {
    return (size_t)kernel->result_bytes * kernel->lanes;
}

/* ---- Blocks ---------------------------------------------------------------------------------
 * One job is shared by all threads of a call. A copy is a job without a kernel, in units of
 * bytes. */
struct job {
    const struct reduce_kernel *kernel;
    const void *const *sources;
    size_t inputs;
    char *destination;
    size_t units, chunk_units;
    atomic_size_t next; /* first unit that no thread has taken */
};

/* Reduces the units [begin, end). The destination's block is written after every source's block was
 * read, so the destination may be one of the sources. */
static void reduce_range(const struct job *job, size_t begin, size_t end) {
    _Alignas(REDUCE_LINE_BYTES) char accumulator[REDUCE_BLOCK_BYTES];
    _Alignas(REDUCE_LINE_BYTES) char narrowed[REDUCE_BLOCK_BYTES / 2];
    const struct reduce_kernel *kernel = job->kernel;
    const size_t block_units = REDUCE_BLOCK_BYTES / kernel->accumulator_bytes;
    for (size_t at = begin; at < end; at += block_units) {
        const size_t units = end - at < block_units ? end - at : block_units;
        const size_t offset = at * kernel->source_bytes;
        const char *first = (const char *)job->sources[0] + offset;
        if (kernel->widen)
            kernel->widen(accumulator, first, units);
        else
            memcpy(accumulator, first, units * kernel->source_bytes);
        for (size_t i = 1; i < job->inputs; i++)
            kernel->fold(accumulator, (const char *)job->sources[i] + offset, units);
        if (kernel->divide) kernel->divide(accumulator, units, job->inputs);
        if (kernel->narrow) kernel->narrow(narrowed, accumulator, units);
        memcpy(job->destination + at * kernel->result_bytes,
               kernel->narrow ? narrowed : accumulator, units * kernel->result_bytes);
    }
}

/* ---- Threads -------------------------------------------------------------------------------- */
static void *work(void *argument) {
    struct job *job = argument;
    for (;;) {
        const size_t begin =
            atomic_fetch_add_explicit(&job->next, job->chunk_units, memory_order_relaxed);
        if (begin >= job->units) break;
        const size_t left = job->units - begin;
        const size_t end = begin + (left < job->chunk_units ? left : job->chunk_units);
        if (job->kernel)
            reduce_range(job, begin, end);
        else
            memcpy(job->destination + begin, (const char *)job->sources[0] + begin, end - begin);
    }
    return NULL;
}

static int threads_useful(size_t bytes_moved, int threads) {
    const size_t useful = bytes_moved / REDUCE_THREAD_BYTES_MIN + 1;
    if (threads > REDUCE_THREADS_MAX) threads = REDUCE_THREADS_MAX;
    return (size_t)threads < useful ? threads : (int)useful;
}

/* Free threads take the next chunk: if a thread cannot be started, the others do its share. */
static int run(struct job *job, int threads) {
    pthread_t others[REDUCE_THREADS_MAX];
    int started = 0;
    if (threads > 1) {
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_BLOCK, &every, &before);
        while (started < threads - 1 && !pthread_create(&others[started], NULL, work, job))
            started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work(job);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
    return started + 1;
}

/* Each thread takes one share, because memcpy of large sizes writes around the caches. */
int reduce_copy(void *destination, const void *source, size_t bytes, int threads) {
    if (destination == source || !bytes) return 1;
    threads = threads_useful(2 * bytes, threads);
    struct job job = {
        .sources = &source,
        .inputs = 1,
        .destination = destination,
        .units = bytes,
        .chunk_units = bytes / (size_t)threads / REDUCE_LINE_BYTES * REDUCE_LINE_BYTES +
                       REDUCE_LINE_BYTES,
    };
    return run(&job, threads);
}

int reduce_run(const struct reduce_kernel *kernel, const void *const *sources, size_t inputs,
               void *destination, size_t count, int threads) {
    const size_t units = count * kernel->lanes;
    if (inputs == 1 && (!kernel->widen || kernel->narrow))
        return reduce_copy(destination, sources[0], units * kernel->source_bytes, threads);
    struct job job = {
        .kernel = kernel,
        .sources = sources,
        .inputs = inputs,
        .destination = destination,
        .units = units,
        .chunk_units = REDUCE_CHUNK_BYTES / kernel->accumulator_bytes,
    };
    const size_t moved = inputs * kernel->source_bytes + kernel->result_bytes;
    return run(&job, threads_useful(units * moved, threads));
}
