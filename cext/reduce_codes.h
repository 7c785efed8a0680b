/* Codes of compressed arrays of float32: sparse pairs, and integers in blocks that share a scale.
 *
 * hoplite_mp.ml sends these codes in place of dense arrays; the owner of a slice folds them without
 * making any of them dense.
 *
 *   - A pair is a uint32 index and a float32 value, 8 bytes. Pairs are added in their order, so an
 *     index that occurs twice counts twice.
 *   - A block of float32 has one scale, max |x| / levels, and for each element an int8, x / scale
 *     rounded to nearest even, within [-levels, levels]. A scale that is 0 gives codes 0. A block
 *     with an element that is not finite has the scale NaN, and so decodes to NaN.
 *
 * Every operation is rounded separately (no contraction), with equal results on every CPU. Buffers
 * have any alignment and do not overlap. Nothing is allocated.
 */
#ifndef REDUCE_CODES_H
#define REDUCE_CODES_H

#include <stddef.h>
#include <stdint.h>

enum { CODES_PAIR_BYTES = 8, CODES_LEVELS_MAX = 127 };

/* The position of the first pair whose index is not below `count`, or `pairs` if there is none. */
size_t codes_first_outside(const void *from, size_t pairs, size_t count);

/* into[index] += factor * value for each pair; every index is inside. */
void codes_add_pairs(const void *from, size_t pairs, void *into, float factor);

/* Codes of `count` elements in blocks of `block`: one scale for each block, one int8 for each. */
void codes_quantise(const void *from, size_t count, size_t block, int levels, void *scales,
                    int8_t *codes);

/* into[i] += factor * (scale * code) */
void codes_add_quantised(const int8_t *codes, const void *scales, size_t count, size_t block,
                         void *into, float factor);

#endif
