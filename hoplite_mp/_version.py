"""The version of the package, and the check that it can run on this platform.

The package's `__init__` imports this module first, so that on an unsupported platform the user
sees a clear message instead of an error from an internal module.
"""

import sys
import warnings

__version__ = "0.1.0"

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"hoplite_mp needs Linux; on {sys.platform} run it in a Linux container or WSL2."
    )
if sys.version_info < (3, 11):  # noqa: UP036 - pip checks it too, a copied source tree does not
    raise ImportError(
        f"hoplite_mp needs Python 3.11 or newer; this is Python {sys.version.split()[0]}."
    )


def _check_gil() -> None:
    """Warns if the interpreter runs without a GIL. Raises ImportError if the GIL will stay off:
    CPython turns it on for the first compiled module that needs it, except with `PYTHON_GIL=0`."""
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return
    if getattr(sys.flags, "gil", None) == 0:
        raise ImportError(
            "hoplite_mp cannot run without the GIL: remove PYTHON_GIL=0 (or -X gil=0), which keeps "
            "it off."
        )
    warnings.warn(
        "hoplite_mp turns the GIL on for this whole process, because its compiled modules rely on "
        "it; set PYTHON_GIL=1 to start with the GIL and without this warning, or use a standard "
        "build of Python.",
        RuntimeWarning,
        stacklevel=2,
    )


_check_gil()
