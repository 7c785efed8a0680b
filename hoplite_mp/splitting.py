"""Which Groups come out of one: who is in which, in which order, and what they are called.

Why it exists: every member derives the same from what all have given, so that nobody has to be
asked; only who is a member of the new Group the manager still says.
It must never know: boards, processes, how a member joins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.client.memory import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_split", "peers_of", "split_name"]

NAME_SHARE_CHARS = 100  # of the name of the Group that is split, in those of its parts
LIMIT = 1 << 62


def check_split(color: Any, key: Any) -> None:
    """TypeError, ValueError: these are no color and no key."""
    for name, value in (("color", color), ("key", key)):
        if name == "color" and value is None:
            continue
        number = whole(value)
        if number is None:
            raise TypeError(
                f"{name}={value!r}: it must be an integer" + " or None" * (name == "color")
            )
        if abs(number) > LIMIT:
            raise ValueError(f"{name}={value!r}: it must be from {-LIMIT} to {LIMIT}")


def peers_of(given: Sequence[Any], color: int) -> list[tuple[int, Any]]:
    """(rank, identity) of those who gave that color, in the order of the new ranks. `given`: by
    rank (color, key, identity), None for the dead."""
    same = [
        (one[1], rank, one[2])
        for rank, one in enumerate(given)
        if one is not None and one[0] is not None and one[0] == color
    ]
    return [(rank, identity) for _, rank, identity in sorted(same)]


def split_name(name: str, generation: int, call: int, color: int) -> str:
    """What no other Group of the cluster is called: a generation's number is used once, and so is
    the number of a call in it."""
    return f"{name[:NAME_SHARE_CHARS]}/{generation}.{call}/{color}"
