"""Compares plans for an allreduce on interconnects that are not a star, for `hoplite-mp simulate
--topology`. No running cluster uses this package.

    interconnect    hosts, switches, links and routes
    tree_schedules  the steps of a plan, and the time of an allreduce
    multitree       the trees of MultiTree
    packed_trees    trees that fill links of different rates
"""
