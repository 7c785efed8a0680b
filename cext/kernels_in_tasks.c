/* The kernels of arithmetic as the module _tasks carries them.
 *
 * Modules are compiled at the same time, each into object files of its own, and two that compile
 * one file would write the same object file.
 */
#include "reduce_kernels.c"
