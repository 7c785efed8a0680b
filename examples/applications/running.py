"""The arguments and the output of these programs.

Each program takes one argument in JSON: `python -m examples.applications.asynchronous_sgd.ours
'{"seconds": 5}'`, and prints lines of JSON. Without "address" the program runs on this host only.
"""

import json
import sys
import time
from types import SimpleNamespace


def arguments(**defaults):
    """The defaults, overridden by the command line."""
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    defaults = {"address": None, "hosts": 4} | defaults
    unknown = given.keys() - defaults.keys()
    if unknown:
        sys.exit(f"no argument {', '.join(sorted(unknown))}; there are {', '.join(defaults)}")
    return SimpleNamespace(**(defaults | given))


def say(event, **more):
    """Prints a line of JSON; `begun` and `ended` enclose the measured time, `result` is last."""
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)
