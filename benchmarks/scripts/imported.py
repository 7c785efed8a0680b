"""Prints the seconds that the import of one module takes, which the argument names."""

import importlib
import sys
import time

began = time.perf_counter()
importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - began
print(f'{{"seconds": {seconds}}}')
