/* crc32c, and the header check that uses it.
 *
 * TCP's own checksum has 16 bits, and the network card often computes it. A block that a switch has
 * corrupted must not become part of a sum. crc32c, because CPUs have an instruction for it.
 *
 * Method: the instruction takes 8 bytes per cycle, but has a latency of 3 cycles. So three parts of
 * the data are processed in turn and joined: crc(A B) = shift(crc(A), len B) ^ crc(B), where shift
 * appends zeros. Appending a fixed number of zeros is linear in the crc, hence four tables of 256
 * words. Source: V. Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32
 * Instruction" (Intel, 2011), and M. Adler's crc32c.c.
 *
 * CPUs that multiply four pairs of polynomials at once (VPCLMULQDQ) are twice as fast: 64 bytes are
 * a polynomial, which is moved by D bits to the following bytes by a multiplication with x^D modulo
 * the crc's polynomial. Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction" (Intel, 2009), for reversed bits. The method is chosen at run time.
 *
 */
#include "engine_frames.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_INSTRUCTION 1
#endif
#if defined(HAVE_INSTRUCTION) && (defined(__clang__) ? __clang_major__ >= 7 : __GNUC__ >= 8)
#define HAVE_WIDE 1
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,vpclmulqdq,pclmul,sse4.2")))
#endif

enum {
    POLYNOMIAL = 0x82f63b78, /* Castagnoli, bits reversed */
    PART_BYTES_LONG = 4096,  /* three parts, then three short ones, then the rest */
    PART_BYTES_SHORT = 256,
    WIDE_BYTES = 64,              /* one register: four parts of 16 bytes */
    STRIDE_BYTES = 4 * WIDE_BYTES, /* four registers, because a product takes 6 cycles */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t slices[8][256];
static uint32_t shift_long[4][256], shift_short[4][256];
#ifdef HAVE_INSTRUCTION
static int have_instruction;
#endif
#ifdef HAVE_WIDE
static int have_wide;
/* The factors that move a polynomial by that many bytes, for its lower and its upper half. */
static uint64_t by_stride[2], by_wide[2], by_parts[3][2];
#endif

/* The crc register after `bytes` zero bytes, from `crc`, bit by bit; only to make the tables. */
static uint32_t append_zeros(uint32_t crc, size_t bytes) {
    while (bytes--) crc = slices[0][crc & 255] ^ (crc >> 8);
    return crc;
}

static void make_shift(uint32_t table[4][256], size_t bytes) {
    uint32_t bit_image[32];
    for (int bit = 0; bit < 32; bit++) bit_image[bit] = append_zeros((uint32_t)1 << bit, bytes);
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t image = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1) image ^= bit_image[8 * byte + bit];
            table[byte][value] = image;
        }
}

#ifdef HAVE_WIDE
/* x^exponent modulo the polynomial, one bit further up, because a product of reversed bits is one
 * bit short. */
static uint64_t power(unsigned exponent) {
    uint32_t remainder = 1u << 31;
    while (exponent--) remainder = remainder & 1 ? remainder >> 1 ^ POLYNOMIAL : remainder >> 1;
    return (uint64_t)remainder << 1;
}

static void make_move(uint64_t move[2], unsigned bytes) {
    move[0] = power(8 * bytes + 32);
    move[1] = power(8 * bytes - 32);
}
#endif

static void make_tables(void) {
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        slices[0][value] = crc;
    }
    for (uint32_t value = 0; value < 256; value++)
        for (int slice = 1; slice < 8; slice++)
            slices[slice][value] =
                slices[0][slices[slice - 1][value] & 255] ^ slices[slice - 1][value] >> 8;
    make_shift(shift_long, PART_BYTES_LONG);
    make_shift(shift_short, PART_BYTES_SHORT);
#ifdef HAVE_INSTRUCTION
    have_instruction = __builtin_cpu_supports("sse4.2");
#endif
#ifdef HAVE_WIDE
    have_wide = have_instruction && __builtin_cpu_supports("avx512f") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
    make_move(by_stride, STRIDE_BYTES);
    make_move(by_wide, WIDE_BYTES);
    for (unsigned part = 0; part < 3; part++) make_move(by_parts[part], 16 * (3 - part));
#endif
}

static inline uint64_t load64(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* Eight bytes per step, with eight tables. `crc` is the register, not inverted. */
static uint32_t register_by_table(uint32_t crc, const uint8_t *data, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, data += 8) {
        const uint64_t word = load64(data) ^ crc;
        crc = 0;
        for (int slice = 0; slice < 8; slice++)
            crc ^= slices[7 - slice][word >> (8 * slice) & 255];
    }
    while (bytes--) crc = slices[0][(crc ^ *data++) & 255] ^ crc >> 8;
    return crc;
}

#ifdef HAVE_INSTRUCTION
static inline uint32_t shift(const uint32_t table[4][256], uint32_t crc) {
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^
           table[3][crc >> 24];
}

static inline __attribute__((target("sse4.2"))) const uint8_t *
three_parts(uint64_t *crc, const uint8_t *data, size_t *bytes, size_t part,
            const uint32_t table[4][256]) {
    while (*bytes >= 3 * part) {
        uint64_t first = *crc, second = 0, third = 0;
        for (const uint8_t *end = data + part; data < end; data += 8) {
            first = _mm_crc32_u64(first, load64(data));
            second = _mm_crc32_u64(second, load64(data + part));
            third = _mm_crc32_u64(third, load64(data + 2 * part));
        }
        const uint32_t joined = shift(table, (uint32_t)first) ^ (uint32_t)second;
        *crc = shift(table, joined) ^ (uint32_t)third;
        data += 2 * part;
        *bytes -= 3 * part;
    }
    return data;
}

static __attribute__((target("sse4.2"))) uint32_t register_by_cpu(uint32_t start,
                                                                  const uint8_t *data,
                                                                  size_t bytes) {
    uint64_t crc = start;
    data = three_parts(&crc, data, &bytes, PART_BYTES_LONG, shift_long);
    data = three_parts(&crc, data, &bytes, PART_BYTES_SHORT, shift_short);
    for (; bytes >= 8; bytes -= 8, data += 8) crc = _mm_crc32_u64(crc, load64(data));
    while (bytes--) crc = _mm_crc32_u8((uint32_t)crc, *data++);
    return (uint32_t)crc;
}
#endif

#ifdef HAVE_WIDE
/* `data` ^ the sum of both moved halves of `folded`. */
static inline WIDE __m512i moved(__m512i folded, __m512i move, __m512i data) {
    enum { XOR_OF_THREE = 0x96 };
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(folded, move, 0x00),
                                     _mm512_clmulepi64_epi128(folded, move, 0x11), data,
                                     XOR_OF_THREE);
}

static inline WIDE __m128i moved_part(__m128i folded, const uint64_t move[2], __m128i data) {
    const __m128i by = _mm_loadu_si128((const __m128i *)move);
    const __m128i halves = _mm_xor_si128(_mm_clmulepi64_si128(folded, by, 0x00),
                                         _mm_clmulepi64_si128(folded, by, 0x11));
    return _mm_xor_si128(halves, data);
}

static inline WIDE __m512i four_times(const uint64_t move[2]) {
    return _mm512_broadcast_i64x2(_mm_loadu_si128((const __m128i *)move));
}

/* At least STRIDE_BYTES. */
static WIDE uint32_t register_by_products(uint32_t start, const uint8_t *data, size_t bytes) {
    __m512i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = _mm512_loadu_si512(data + i * WIDE_BYTES);
    const __m512i begun = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)start));
    lanes[0] = _mm512_xor_si512(lanes[0], begun);
    __m512i move = four_times(by_stride);
    for (data += STRIDE_BYTES, bytes -= STRIDE_BYTES; bytes >= STRIDE_BYTES;
         data += STRIDE_BYTES, bytes -= STRIDE_BYTES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            lanes[i] = moved(lanes[i], move, _mm512_loadu_si512(data + i * WIDE_BYTES));
    move = four_times(by_wide);
    for (int i = 1; i < 4; i++) lanes[i] = moved(lanes[i - 1], move, lanes[i]);
    for (; bytes >= WIDE_BYTES; data += WIDE_BYTES, bytes -= WIDE_BYTES)
        lanes[3] = moved(lanes[3], move, _mm512_loadu_si512(data));
    __m128i last = _mm512_extracti64x2_epi64(lanes[3], 3);
    last = moved_part(_mm512_extracti64x2_epi64(lanes[3], 2), by_parts[2], last);
    last = moved_part(_mm512_extracti64x2_epi64(lanes[3], 1), by_parts[1], last);
    last = moved_part(_mm512_extracti64x2_epi64(lanes[3], 0), by_parts[0], last);
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(last, 0));
    crc = _mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(last, 1));
    return register_by_cpu((uint32_t)crc, data, bytes);
}
#endif

uint32_t crc32c_by_table(uint32_t crc, const void *data, size_t bytes) {
    pthread_once(&once, make_tables);
    return ~register_by_table(~crc, data, bytes);
}

uint32_t crc32c_by_instruction(uint32_t crc, const void *data, size_t bytes) {
    pthread_once(&once, make_tables);
#ifdef HAVE_INSTRUCTION
    if (have_instruction) return ~register_by_cpu(~crc, data, bytes);
#endif
    return ~register_by_table(~crc, data, bytes);
}

uint32_t crc32c(uint32_t crc, const void *data, size_t bytes) {
    pthread_once(&once, make_tables);
#ifdef HAVE_WIDE
    if (have_wide && bytes >= STRIDE_BYTES) return ~register_by_products(~crc, data, bytes);
#endif
    return crc32c_by_instruction(crc, data, bytes);
}

/* ---- Headers -------------------------------------------------------------------------------- */
void frame_seal(struct frame *frame) {
    frame->header_crc = crc32c(0, frame, offsetof(struct frame, header_crc));
}

const char *frame_fault(const struct frame *frame) {
    if (frame->magic != FRAME_MAGIC) return "received bytes are not a frame of this version";
    if (frame->header_crc != crc32c(0, frame, offsetof(struct frame, header_crc)))
        return "a header does not match its checksum";
    if (frame->type < FRAME_REQUEST || frame->type >= FRAME_TYPE_END)
        return "a frame of an unknown type";
    if (frame->type == FRAME_COLL)
        return frame->length > FRAME_COLL_BYTES_MAX || frame->part >= FRAME_COLL_PHASES || frame->reason
                   ? "a small call's frame of a wrong form"
                   : NULL;
    if (frame->type == FRAME_DATA ? !frame->length || frame->length > FRAME_BLOCK_BYTES_MAX
                                  : frame->length != 0)
        return "a frame of a wrong length";
    if (frame->offset > frame->end || frame->length > frame->end - frame->offset)
        return "a frame that reaches beyond its cell";
    if (frame->reason >= REASON_END || (frame->type == FRAME_REFUSED) != !!frame->reason)
        return "a refusal without a reason, or a reason without a refusal";
    return NULL;
}
