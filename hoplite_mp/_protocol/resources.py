"""The messages between a client and its node about resources.

A task without resources costs no message. A task with resources is announced to the node, which
decides when and where the task may begin.
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


class TakeResources(msgspec.Struct, frozen=True, tag="TakeResources", array_like=True):
    """The arguments of that task of the caller are ready; the task begins when it gets these
    resources. No reply."""

    oid: int
    demand: Wanted


class GiveBack(msgspec.Struct, frozen=True, tag="GiveBack", array_like=True):
    """The generator of that task has ended in the caller. No reply."""

    oid: int


class KeepForStream(msgspec.Struct, frozen=True, tag="KeepForStream", array_like=True):
    """That task is a generator that the caller runs. It keeps its resources until GiveBack,
    although the task itself ends earlier. Reply: None."""

    oid: int


class ResourcePlaces(msgspec.Struct, frozen=True, tag="ResourcePlaces", array_like=True):
    """Requests the places where that demand can be met. Reply: for every node that is not leaving
    (node, workers in its common pool, how many times it could meet the demand simultaneously if
    nothing were in use, how many times now)."""

    demand: Wanted


class AssignedAsked(msgspec.Struct, frozen=True, tag="AssignedAsked", array_like=True):
    """Requests the indices assigned to that task or, for 0, to the caller's process. Reply: name to
    list."""

    oid: int


ResourceAsk: TypeAlias = TakeResources | GiveBack | KeepForStream | ResourcePlaces | AssignedAsked
