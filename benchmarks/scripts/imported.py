"""Prints the seconds that it takes to import a module, and to use a name of it for the first time;
the arguments name the module and perhaps the name."""

import importlib
import sys
import time

began = time.perf_counter()
module = importlib.import_module(sys.argv[1])
for name in sys.argv[2:]:
    getattr(module, name)
seconds = time.perf_counter() - began
print(f'{{"seconds": {seconds}}}')
