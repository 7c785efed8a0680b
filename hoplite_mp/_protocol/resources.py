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
    """Requests resources for a task whose arguments are ready; the task begins when they are
    assigned. No reply."""

    oid: int
    demand: Demand


class ReleaseResources(msgspec.Struct, frozen=True, tag="GiveBack", array_like=True):
    """The caller has finished running the generator of task `oid`. No reply."""

    oid: int


class RetainResources(msgspec.Struct, frozen=True, tag="KeepForStream", array_like=True):
    """Task `oid` returns a generator, which the caller runs. The task keeps its resources until
    ReleaseResources, even after the task has ended. Reply: None."""

    oid: int


class ResourcePlaces(msgspec.Struct, frozen=True, tag="ResourcePlaces", array_like=True):
    """Requests the nodes that can meet the demand. Reply: for every node that is not leaving, a
    tuple (node, number of workers in its common pool, number of such demands that its total
    resources can meet, number that its free resources can meet)."""

    demand: Demand


class AssignedResources(msgspec.Struct, frozen=True, tag="AssignedAsked", array_like=True):
    """Requests the resource indices assigned to task `oid` or, if `oid` is 0, to the caller's
    process. Reply: a dict of resource name -> list of indices."""

    oid: int


ResourceRequest: TypeAlias = (
    AcquireResources | ReleaseResources | RetainResources | ResourcePlaces | AssignedResources
)
