"""All mistakes that the simulation has to see.

A campaign is as good as the mistakes that it finds. Each mutant changes one place of a file that
users run, and every one is to be noticed by a program on several hosts, or by whoever operates
them: a wrong value, wrong contributors, a hang, a leak, an object lost without need. The list was
written from the shipped code alone, without a look at the campaign.
"""

from __future__ import annotations

from tests.mutants import bounded, collectives, groups, learning, node, objects, planner, recovery

__all__ = ["MUTANTS"]

MUTANTS = (
    *bounded.MUTANTS,
    *collectives.MUTANTS,
    *groups.MUTANTS,
    *learning.MUTANTS,
    *node.MUTANTS,
    *objects.MUTANTS,
    *planner.MUTANTS,
    *recovery.MUTANTS,
)
