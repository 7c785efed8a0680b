#include "reduce_order.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Defined for both widths: REAL, KEY (a signed integer of its size), UKEY, and the mask of its
 * exponent. A right shift of a signed key keeps its sign in GCC and Clang. */
#define DEFINE_ORDER(SUFFIX, REAL, KEY, UKEY, BITS, KEY_MAX, EXPONENT)                             \
    static KEY flip_##SUFFIX(KEY key) { return key ^ ((key >> (BITS - 1)) & KEY_MAX); }            \
                                                                                                   \
    static void load_##SUFFIX(KEY *restrict row, const char *source, size_t lanes) {               \
        for (size_t i = 0; i < lanes; i++) {                                                       \
            KEY key;                                                                               \
            memcpy(&key, source + i * sizeof(REAL), sizeof key);                                   \
            row[i] = (key & KEY_MAX) > EXPONENT ? KEY_MAX : flip_##SUFFIX(key);                    \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void sort_pair_##SUFFIX(KEY *restrict low, KEY *restrict high) {                        \
        for (size_t i = 0; i < ORDER_LANES; i++) {                                                 \
            KEY a = low[i], b = high[i];                                                           \
            low[i] = a < b ? a : b;                                                                \
            high[i] = a < b ? b : a;                                                               \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static void sort_rows_##SUFFIX(KEY *rows, size_t n) {                                          \
        size_t top = 1;                                                                            \
        while (2 * top < n)                                                                        \
            top *= 2;                                                                              \
        for (size_t p = top; p > 0 && n > 1; p /= 2) {                                             \
            size_t r = 0, d = p;                                                                   \
            for (size_t q = top;; q /= 2) {                                                        \
                for (size_t i = 0; i + d < n; i++)                                                 \
                    if ((i & p) == r)                                                              \
                        sort_pair_##SUFFIX(rows + i * ORDER_LANES, rows + (i + d) * ORDER_LANES);  \
                if (q == p)                                                                        \
                    break;                                                                         \
                d = q - p;                                                                         \
                r = p;                                                                             \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static REAL value_##SUFFIX(KEY key) {                                                          \
        REAL value;                                                                                \
        key = flip_##SUFFIX(key);                                                                  \
        memcpy(&value, &key, sizeof value);                                                        \
        return value;                                                                              \
    }                                                                                              \
                                                                                                   \
    static void mean_rows_##SUFFIX(const KEY *rows, size_t low, size_t high, char *result,         \
                                   size_t lanes) {                                                 \
        for (size_t i = 0; i < lanes; i++) {                                                       \
            REAL value = value_##SUFFIX(rows[low * ORDER_LANES + i]);                              \
            if (high > low + 1) {                                                                  \
                double sum = value;                                                                \
                for (size_t at = low + 1; at < high; at++)                                         \
                    sum += value_##SUFFIX(rows[at * ORDER_LANES + i]);                             \
                value = (REAL)(sum / (double)(high - low));                                        \
            }                                                                                      \
            memcpy(result + i * sizeof(REAL), &value, sizeof value);                               \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static int order_mean_##SUFFIX(const void *const *sources, size_t inputs, size_t count,        \
                                   size_t low, size_t high, char *result) {                        \
        KEY *rows = calloc(inputs * ORDER_LANES, sizeof *rows);                                    \
        if (rows == NULL)                                                                          \
            return -1;                                                                             \
        for (size_t begin = 0; begin < count; begin += ORDER_LANES) {                              \
            size_t lanes = count - begin < ORDER_LANES ? count - begin : ORDER_LANES;              \
            size_t offset = begin * sizeof(REAL);                                                  \
            for (size_t at = 0; at < inputs; at++)                                                 \
                load_##SUFFIX(rows + at * ORDER_LANES, (const char *)sources[at] + offset, lanes); \
            sort_rows_##SUFFIX(rows, inputs);                                                      \
            mean_rows_##SUFFIX(rows, low, high, result + offset, lanes);                           \
        }                                                                                          \
        free(rows);                                                                                \
        return 0;                                                                                  \
    }                                                                                              \
                                                                                                   \
    static int all_finite_##SUFFIX(const char *source, size_t count) {                             \
        for (size_t begin = 0; begin < count; begin += ORDER_LANES) {                              \
            size_t lanes = count - begin < ORDER_LANES ? count - begin : ORDER_LANES;              \
            UKEY bad = 0;                                                                          \
            for (size_t i = 0; i < lanes; i++) {                                                   \
                KEY key;                                                                           \
                memcpy(&key, source + (begin + i) * sizeof(REAL), sizeof key);                     \
                bad |= (key & EXPONENT) == EXPONENT;                                               \
            }                                                                                      \
            if (bad)                                                                               \
                return 0;                                                                          \
        }                                                                                          \
        return 1;                                                                                  \
    }

DEFINE_ORDER(float, float, int32_t, uint32_t, 32, INT32_MAX, 0x7f800000)
DEFINE_ORDER(double, double, int64_t, uint64_t, 64, INT64_MAX, 0x7ff0000000000000)

int reduce_order_mean(int is_double, const void *const *sources, size_t inputs, size_t count,
                      size_t low, size_t high, void *result) {
    if (is_double)
        return order_mean_double(sources, inputs, count, low, high, result);
    return order_mean_float(sources, inputs, count, low, high, result);
}

int reduce_all_finite(int is_double, const void *source, size_t count) {
    return is_double ? all_finite_double(source, count) : all_finite_float(source, count);
}
