/* Order statistics of n arrays, coordinate by coordinate, and a scan for values that are not finite.
 *
 * The coordinates are cut into blocks of ORDER_LANES. The n values of each coordinate of a block are
 * sorted by Batcher's odd-even merge network (Knuth, TAOCP 3, algorithm 5.2.2M). The network compares
 * whole rows of a block, so each comparison is one vector minimum and one vector maximum. Floats are
 * compared as integers whose order is that of the floats: -inf first, then inf, then every NaN.
 */
#ifndef REDUCE_ORDER_H
#define REDUCE_ORDER_H

#include <stddef.h>

enum {
    ORDER_LANES = 64,
    /* Maximum number of rows of the work area: 512 KiB of float64. */
    ORDER_INPUTS_MAX = 1024
};

/* result[i] = the mean of the values low to high - 1 of the sorted sources[0..inputs)[i]; with high
 * == low + 1 exactly that value. is_double: float64, otherwise float32. The sum is taken in
 * float64, in ascending order. -1: no memory. 0 <= low < high <= inputs <= ORDER_INPUTS_MAX. */
int reduce_order_mean(int is_double, const void *const *sources, size_t inputs, size_t count,
                      size_t low, size_t high, void *result);

/* Whether no element is NaN or infinite. */
int reduce_all_finite(int is_double, const void *source, size_t count);

#endif
