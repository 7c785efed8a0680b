"""A ref that an engine carries between processes of which the sender holds it long enough.

Why it exists: where this library itself sends a ref through an engine and hears what became of it,
nobody needs Config.foreign_hold_s: the sender keeps the object until then, and its memory returns
as soon as nobody wants it, not ten minutes later.
It must never know: which engine that is.
"""

from __future__ import annotations

from typing import Any

from hoplite_mp.ref import ObjectRef, named

__all__ = ["CarriedRef"]


class CarriedRef:
    """The ref inside holds the object where this lies; bytes of it hold nothing."""

    __slots__ = ("ref",)

    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, named(self.ref)

    def __repr__(self) -> str:
        return f"CarriedRef({self.ref})"


def _load(attach: Any, arguments: tuple[Any, ...]) -> CarriedRef:
    return CarriedRef(attach(*arguments))
