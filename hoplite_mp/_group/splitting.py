"""The Groups into which a Group is split: their members in order, and their names.

Every member derives the same from what all have given, so that it need not ask any other process.
Only the manager, however, makes a process a member of a new Group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._client.memory import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_split", "peers_of", "split_name"]

NAME_SHARE_CHARS = 100  # how much of a Group's name is in the names of its parts
LIMIT = 1 << 62


def check_split(color: Any, key: Any) -> None:
    """TypeError, ValueError: one of them is not allowed."""
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
    """(rank, identity) of the ranks that gave that color, in the order of the new ranks. `given`:
    by rank (color, key, identity), None for the dead."""
    same = [
        (one[1], rank, one[2])
        for rank, one in enumerate(given)
        if one is not None and one[0] is not None and one[0] == color
    ]
    return [(rank, identity) for _, rank, identity in sorted(same)]


def split_name(
    name: str, generation: int, call: int, color: int, peers: Sequence[tuple[int, Any]]
) -> str:
    """A name that no other Group of the cluster has, because a generation's number is used once,
    and so is the number of a call in it. The ranks of `peers` are part of the name, in hexadecimal,
    because a call is decided again without a host that is lost or leaves: members on that host may
    have read the first decision, and have made a Group of more members of it."""
    ranks = sum(1 << rank for rank, _ in peers)
    return f"{name[:NAME_SHARE_CHARS]}/{generation}.{call}/{color}/{ranks:x}"
