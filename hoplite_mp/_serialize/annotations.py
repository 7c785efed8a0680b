"""The annotations of a function or class, without an error for names that do not exist.

Since Python 3.14 annotations are evaluated when they are read (PEP 649), so a name that only type
checkers import is an error at that moment. A function by value travels with the present values of
its annotations, or with their text if one of them cannot be evaluated.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

__all__ = ["annotations_of", "own_annotations", "with_annotations"]

IS_LAZY = sys.version_info >= (3, 14)


def annotations_of(function: Any) -> dict[str, Any]:
    """The annotations of a function."""
    try:
        found: dict[str, Any] = function.__annotations__
    except Exception:
        if not IS_LAZY:
            raise
        return _as_text(function, function.__annotate__)
    return found


def own_annotations(cls: type) -> dict[str, Any] | None:
    """The annotations in the body of a class; None if there are none."""
    own = vars(cls)
    found: dict[str, Any] | None = own.get("__annotations__", own.get("__annotations_cache__"))
    annotate = own.get("__annotate_func__")
    if found is not None or annotate is None:
        return found
    try:
        found = annotate(1)  # annotationlib.Format.VALUE, without the import
    except Exception:
        return _as_text(cls, annotate)
    return found


def with_annotations(function: types.FunctionType) -> types.FunctionType:
    """The function; or a copy with annotations as text, if the function's cannot be evaluated."""
    if not IS_LAZY:
        return function
    try:
        function.__annotations__  # noqa: B018
    except Exception:
        about = function.__name__, function.__defaults__, function.__closure__
        copy: Any = types.FunctionType(function.__code__, function.__globals__, *about)
        copy.__dict__.update(vars(function))
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__type_params__"):
            setattr(copy, name, getattr(function, name))
        copy.__annotations__ = annotations_of(function)
        return copy  # type: ignore[no-any-return]
    return function


def _as_text(owner: Any, annotate: Any) -> dict[str, Any]:
    library = importlib.import_module("annotationlib")
    found: dict[str, Any] = library.call_annotate_function(
        annotate, library.Format.STRING, owner=owner
    )
    return found
