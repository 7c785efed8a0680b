/* Encodes and adds the codes that reduce_codes.h describes. */
#include "reduce_codes.h"

#include <float.h>
#include <math.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC optimize("O3", "fp-contract=off", "no-trapping-math")
#elif defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif
#ifdef __FAST_MATH__
#error "the results are promised to the bit: build without -ffast-math"
#endif

typedef float f32 __attribute__((aligned(1), may_alias));

struct __attribute__((packed, may_alias)) pair {
    uint32_t index;
    float value;
};
_Static_assert(sizeof(struct pair) == CODES_PAIR_BYTES, "a pair has no padding");

size_t codes_first_outside(const void *from, size_t pairs, size_t count) {
    const struct pair *pair = from;
    size_t i = 0;
    while (i < pairs && pair[i].index < count) i++;
    return i;
}

void codes_add_pairs(const void *from, size_t pairs, void *into, float factor) {
    const struct pair *pair = from;
    f32 *sum = into;
    for (size_t i = 0; i < pairs; i++) {
        const float term = factor * pair[i].value;
        sum[pair[i].index] += term;
    }
}

/* The scale of a block; 0 for a block of zeros, NaN if an element is not finite. */
static float scale_of(const f32 *x, size_t count, int levels) {
    float most = 0;
    int bad = 0;
    for (size_t i = 0; i < count; i++) {
        const float size = fabsf(x[i]);
        bad |= !(size <= FLT_MAX);
        most = size > most ? size : most;
    }
    return bad ? NAN : most / (float)levels;
}

/* Adding 1.5 * 2^23 rounds to an integer, to nearest even. |x / scale| is at most about 190, namely
 * if the scale is the smallest float, to which the quotient was rounded down. */
static void quantise_block(const f32 *x, size_t count, float scale, int levels, int8_t *codes) {
    const float shift = 12582912.0f, most = (float)levels;
    if (!(scale > 0)) {
        for (size_t i = 0; i < count; i++) codes[i] = 0;
        return;
    }
    for (size_t i = 0; i < count; i++) {
        const float shifted = x[i] / scale + shift;
        const float rounded = shifted - shift;
        const float low = rounded < -most ? -most : rounded;
        codes[i] = (int8_t)(low > most ? most : low);
    }
}

void codes_quantise(const void *from, size_t count, size_t block, int levels, void *scales,
                    int8_t *codes) {
    const f32 *x = from;
    f32 *scale = scales;
    for (size_t at = 0; at < count; at += block, scale++) {
        const size_t size = count - at < block ? count - at : block;
        *scale = scale_of(x + at, size, levels);
        quantise_block(x + at, size, *scale, levels, codes + at);
    }
}

void codes_add_quantised(const int8_t *codes, const void *scales, size_t count, size_t block,
                         void *into, float factor) {
    const f32 *scale = scales;
    f32 *sum = into;
    for (size_t at = 0; at < count; at += block, scale++) {
        const size_t size = count - at < block ? count - at : block;
        const float step = *scale;
        for (size_t i = at; i < at + size; i++) {
            const float value = step * (float)codes[i];
            const float term = factor * value;
            sum[i] += term;
        }
    }
}
