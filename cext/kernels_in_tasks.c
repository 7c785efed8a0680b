/* The kernels of arithmetic as the module _tasks carries them.
 *
 * Why it exists: modules are compiled at the same time, each into object files of its own, and two
 * that compile one file would write the same object file.
 * It must never know: what a kernel computes.
 */
#include "reduce_kernels.c"
