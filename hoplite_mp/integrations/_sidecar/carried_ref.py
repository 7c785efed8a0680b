"""A ref that an engine carries to another process while the sender itself holds the object.

Where this library itself sends a ref through an engine, and learns when it has arrived, no node has
to hold the object for Config.foreign_hold_s. The sender holds it until then, so its memory is free
as soon as no process needs it, not ten minutes later.
"""

from __future__ import annotations

from typing import Any

from hoplite_mp._common.ref import ObjectRef, named

__all__ = ["CarriedRef"]


class CarriedRef:
    """Contains a ref, which holds the object in this process; its pickled bytes hold nothing."""

    __slots__ = ("ref",)

    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, named(self.ref)

    def __repr__(self) -> str:
        return f"CarriedRef({self.ref})"


def _load(attach: Any, arguments: tuple[Any, ...]) -> CarriedRef:
    return CarriedRef(attach(*arguments))
