"""The version of the package, and the check that it can run on this platform.

The package's `__init__` imports this module first, so that on a wrong platform the user sees one
clear line instead of a failure deep inside.
"""

import sys

__version__ = "0.1.0"

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"hoplite_mp needs Linux; on {sys.platform} run it in a Linux container or WSL2."
    )
if sys.version_info < (3, 11):  # noqa: UP036 - pip checks it too, a copied source tree does not
    raise ImportError(
        f"hoplite_mp needs Python 3.11 or newer; this is Python {sys.version.split()[0]}."
    )
