"""How these programs are told what to do, and say what they have found.

Each takes one argument, a text of JSON: `python -m examples.applications.asynchronous_sgd.ours
'{"seconds": 5}'`, and prints lines of JSON. Without "address" it runs on this host alone.
"""

import json
import sys
import time
from types import SimpleNamespace


def arguments(**defaults):
    """The defaults, and what the command line has instead of them."""
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    defaults = {"address": None, "hosts": 4} | defaults
    unknown = given.keys() - defaults.keys()
    if unknown:
        sys.exit(f"no argument {', '.join(sorted(unknown))}; there are {', '.join(defaults)}")
    return SimpleNamespace(**(defaults | given))


def say(event, **more):
    """A line of JSON; `begun` and `ended` enclose what is measured, `result` is the last one."""
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)
