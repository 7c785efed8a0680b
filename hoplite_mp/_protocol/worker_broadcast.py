"""The messages between a client and its node about one call of `Cluster.run`: a round.

caller ── OpenRound ─►  node     pool of the round, and how many workers it has
       ── tasks of that pool, one for each worker; BeginRound ─►
worker ── TakeRound ─►  node     its task of each round that it has not run yet
caller ── ClosePool ─►  node     the round is over
       ── EndRound ─►   node     tasks that have not begun are not run
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["BeginRound", "EndRound", "OpenRound", "RoundAsk", "TakeRound"]


class OpenRound(msgspec.Struct, frozen=True, tag="OpenRound", array_like=True):
    """Each worker that is now in the common pool of these nodes (none named: of all) is to run one
    task. Reply: (number of a pool for these tasks, how many workers); None if not all nodes have
    answered within `timeout_s`."""

    nodes: list[int] = []
    timeout_s: float | None = None


class BeginRound(msgspec.Struct, frozen=True, tag="BeginRound", array_like=True):
    """All tasks of the round in that pool are queued. No reply."""

    pool: int


class EndRound(msgspec.Struct, frozen=True, tag="EndRound", array_like=True):
    """The caller no longer waits for the round of that pool, which closes. Reply: None, when all
    nodes know it, or those that do not answer in time are given up. No worker of a node that knows
    it begins a task of the round."""

    pool: int


class TakeRound(msgspec.Struct, frozen=True, tag="TakeRound", array_like=True):
    """This worker is between two tasks. Reply: ids of the tasks that it must claim and run."""


RoundAsk: TypeAlias = OpenRound | BeginRound | EndRound | TakeRound
