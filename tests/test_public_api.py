"""The public API matches its record: names, signatures, summaries, `repr` and pickles.

`python -m tests.test_public_api` records them anew, after a change that is meant.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = Path(__file__).resolve().parent / "public_api.txt"
# Modules that users import by name. Those of Ray, Dask and torch need their engines.
MODULES = "hoplite_mp", "hoplite_mp.errors", "hoplite_mp.integrations.joblib"


def signature(function: Any) -> str:
    """As `inspect.signature` shows it, but the same in all versions of Python."""
    shown, star = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        type_ = "" if one.annotation is one.empty else f": {written(one.annotation)}"
        default = "" if one.default is one.empty else f" = {one.default!r}"
        shown.append(f"{prefix}{one.name}{type_}{default}")
    returned = inspect.signature(function).return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {written(returned)}"
    return f"({', '.join(shown)}){arrow}"


def written(annotation: Any) -> str:
    """An annotation as the source has it."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def summary(thing: Any) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(thing) or "").split("\n")[0]


def public_bases(owner: type) -> list[str]:
    """The classes from which it inherits, as far as users can name them."""
    found = [one for one in owner.__mro__[1:-1] if one.__module__ != "typing"]
    public = {getattr(hoplite_mp, name) for name in hoplite_mp.__all__}
    return [one.__name__ for one in found if one in public or "hoplite" not in one.__module__]


def members(owner: type) -> Iterator[str]:
    """A line for each public member that a class of this library defines."""
    ours = [one for one in owner.__mro__ if one.__module__.startswith("hoplite_mp")]
    for name in sorted({name for one in ours for name in vars(one) if name[0] != "_"}):
        found = inspect.getattr_static(owner, name)
        if isinstance(found, property):
            yield f"{name}: property | {summary(found)}"
        elif isinstance(found, staticmethod | classmethod) or inspect.isroutine(found):
            if inspect.ismethoddescriptor(found) and not hasattr(found, "__func__"):
                yield f"{name}: attribute"  # of a compiled class, or a slot
            else:
                kind = type(found).__name__
                yield f"{name}{signature(getattr(owner, name))} [{kind}] | {summary(found)}"
        else:
            yield f"{name}: attribute"


def lines() -> Iterator[str]:
    """The record, line by line."""
    for module in MODULES:
        imported = importlib.import_module(module)
        yield f"# {module}"
        for name in imported.__all__:
            thing = getattr(imported, name)
            by_name = pickle.dumps(thing, 0).decode().replace("\n", " ").split(" p0")[0]
            yield f"{name} | {thing.__module__} | {by_name} | {summary(thing)}"
            if not isinstance(thing, type):
                yield f"    {signature(thing)}"
                continue
            yield f"    {thing!r}({', '.join(public_bases(thing))})"
            if not issubclass(thing, BaseException):
                yield f"    {signature(thing)}"
            for member in members(thing):
                yield f"    {member}"


def test_public_names_are_the_recorded_ones() -> None:
    assert list(lines()) == RECORD.read_text().splitlines()


def test_errors_pickled_keep_type_and_message() -> None:
    found = [one for one in vars(hoplite_mp.errors).values() if isinstance(one, type)]
    for kind in found:
        if issubclass(kind, hoplite_mp.HopliteError):
            error = kind("the message")
            copy = pickle.loads(pickle.dumps(error))
            assert (type(copy), str(copy), repr(copy)) == (kind, str(error), repr(error))


if __name__ == "__main__":
    RECORD.write_text("\n".join(lines()) + "\n")
    sys.exit(0)
