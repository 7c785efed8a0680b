"""What a client and its node say to each other about resources.

Why it exists: a task without resources costs no message; one with resources is announced to the
node, which says when and where it may begin.
It must never know: how a node shares out what it has.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "AssignedAsked",
    "GiveBack",
    "KeepForStream",
    "ResourceAsk",
    "ResourcePlaces",
    "TakeResources",
    "Wanted",
]

Wanted: TypeAlias = tuple[tuple[str, int], ...]  # (name, units of 1/10000)


class TakeResources(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That task of the caller has its arguments, and begins when it has these resources. No
    reply."""

    oid: int
    demand: Wanted


class GiveBack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The generator of that task has ended in the caller. No reply."""

    oid: int


class KeepForStream(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That task is a generator, which the caller runs: what it has been given is kept until
    GiveBack, although the task itself is done before. Reply: None."""

    oid: int


class ResourcePlaces(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where could that be had? Reply: (node, its workers for all tasks, how often that demand can
    be met there at all, how often just now) of every node."""

    demand: Wanted


class AssignedAsked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Which indices have been given to that task, or, for 0, to the caller's process? Reply: name
    to list."""

    oid: int


ResourceAsk: TypeAlias = TakeResources | GiveBack | KeepForStream | ResourcePlaces | AssignedAsked
