"""What all tests of the front ends to Ray, Dask and torch need; `make test-engines` runs them.

They are no part of `make test`: the engines take 2 GB on disk and minutes to install, so they have
an environment of their own, `.venv-engines`. pytest comes here only when it is told to.
"""

import importlib.metadata

ENGINES = ("ray", "dask", "torch")


def pytest_report_header() -> str:
    return "engines: " + ", ".join(f"{name} {_version(name)}" for name in ENGINES)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing; `make engines` installs it"
