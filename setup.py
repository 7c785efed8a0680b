"""Builds the compiled components of hoplite_mp; everything else is declared in pyproject.toml.

Switches, by environment:
    HOPLITE_MP_DEBUG=1                      -O0 -g, the asserts of the C code are on
    HOPLITE_MP_SANITIZE=address,undefined   instrumented build; see `make sanitize`, `make tsan`

There is no -march: one wheel runs on every CPU of its architecture, and kernels that gain from
wider vectors choose them at run time.
"""

import os
import sys
from glob import glob

if not sys.platform.startswith("linux"):
    sys.exit("hoplite_mp needs Linux; on " + sys.platform + " run it in a Linux container or WSL2.")
if sys.version_info < (3, 11):  # noqa: UP036 - run by hand, nothing else has checked
    sys.exit(
        "hoplite_mp needs Python 3.11 or newer; this is Python " + sys.version.split()[0] + "."
    )

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOMS = ("_shm", "_tasks", "_reduce", "_engine", "_pages")
# What a room borrows from another one's C: each module carries a copy, none imports the other.
BORROWED = {"_engine": ["cext/kernels_in_engine.c"], "_tasks": ["cext/kernels_in_tasks.c"]}
CORES = len(os.sched_getaffinity(0))


def flags() -> tuple[list[str], list[str]]:
    """The compiler's and the linker's flags that the environment asks for."""
    # Loops that Cython writes compare an int with an unsigned bound, which is no news to anybody.
    compile_args = ["-std=gnu11", "-fno-strict-aliasing", "-Wall", "-Wno-sign-compare"]
    link_args: list[str] = []
    if os.environ.get("HOPLITE_MP_DEBUG", "0") not in ("", "0"):
        compile_args += ["-O0", "-g", "-UNDEBUG"]
    else:
        compile_args += ["-O2"]
    sanitizers = os.environ.get("HOPLITE_MP_SANITIZE", "")
    if sanitizers:
        compile_args += ["-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
        compile_args += ["-fsanitize=" + sanitizers]
        if "thread" in sanitizers:
            # ThreadSanitizer does not model fences. The words that they order are atomic anyway.
            compile_args += ["-Wno-tsan"]
        link_args += ["-fsanitize=" + sanitizers]
    return compile_args, link_args


def room(name: str) -> Extension:
    """`_reduce` is made of cext/_reduce.pyx and every hand-written cext/reduce_*.c."""
    compile_args, link_args = flags()
    by_hand = glob(f"cext/{name}_*.c") + glob(f"cext/{name.lstrip('_')}_*.c")
    return Extension(
        f"hoplite_mp.{name}",
        [f"cext/{name}.pyx", *sorted(by_hand), *BORROWED.get(name, [])],
        include_dirs=["cext"],
        # A change to any header rebuilds, and the sdist carries every file of cext/.
        depends=sorted(glob("cext/*")),
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(
    ext_modules=cythonize(
        [room(name) for name in ROOMS if os.path.exists(f"cext/{name}.pyx")],
        build_dir="build/cython",  # generated C never sits beside what is written by hand
        nthreads=CORES,
        compiler_directives={
            "language_level": 3,
            "embedsignature": True,
            "embedsignature.format": "python",
            "auto_pickle": False,
            "autotestdict": False,
            "binding": True,
        },
    ),
    options={"build_ext": {"parallel": CORES}},
)
