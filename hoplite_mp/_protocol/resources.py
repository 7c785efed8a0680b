"""Messages between a client and its node about resources.

Only tasks with resources need these messages: the node decides when and where they may begin.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "AcquireResources",
    "AssignedResources",
    "Demand",
    "ReleaseResources",
    "ResourcePlaces",
    "ResourceRequest",
    "RetainResources",
]

Demand: TypeAlias = tuple[tuple[str, int], ...]  # (name, units of 1/10000), sorted by name


class AcquireResources(msgspec.Struct, frozen=True, tag="TakeResources", array_like=True):
    """Requests resources for a task whose arguments are ready; the task begins when it gets them.
    No reply."""

    oid: int
    demand: Demand


class ReleaseResources(msgspec.Struct, frozen=True, tag="GiveBack", array_like=True):
    """The generator of that task has ended in the caller. No reply."""

    oid: int


class RetainResources(msgspec.Struct, frozen=True, tag="KeepForStream", array_like=True):
    """That task is a generator that the caller runs. It keeps its resources until ReleaseResources,
    beyond the end of the task. Reply: None."""

    oid: int


class ResourcePlaces(msgspec.Struct, frozen=True, tag="ResourcePlaces", array_like=True):
    """Requests the nodes that can meet that demand. Reply: for every node that is not leaving
    (node, workers in its common pool, how many times its total resources meet the demand, how many
    times its free resources do)."""

    demand: Demand


class AssignedResources(msgspec.Struct, frozen=True, tag="AssignedAsked", array_like=True):
    """Requests the indices assigned to that task or, for 0, to the caller's process. Reply: a dict
    of lists by name of resource."""

    oid: int


ResourceRequest: TypeAlias = (
    AcquireResources | ReleaseResources | RetainResources | ResourcePlaces | AssignedResources
)
