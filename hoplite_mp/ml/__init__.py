"""Learning on top of the collectives: operators, compressors, optimisers and estimators.

Importing this package needs numpy only. Each name is imported at its first use; estimators need
scikit-learn then (the extra `ml`).
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    pass
else:
    _MODULES: dict[str, str] = {}

    def __getattr__(name: str) -> object:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return globals().setdefault(name, getattr(import_module(module), name))


__all__: list[str] = []


def __dir__() -> list[str]:
    return sorted(__all__)
