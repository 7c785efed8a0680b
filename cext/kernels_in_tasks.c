/* The arithmetic kernels, compiled for the module _tasks.
 *
 * Modules are compiled concurrently into separate object files; two modules that compile one file
 * would write the same object file.
 */
#include "reduce_kernels.c"
