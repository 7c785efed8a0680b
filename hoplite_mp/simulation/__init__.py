"""The real planner and the real programs on a virtual network, in virtual time.

    timeline  network       when things happen; links with rates and delays
       ▲
    streams                 cells, pulls, serves and folds of one node, by the rule
       ▲
    truth  host             invariants of the bytes; one node's objects and messages
       ▲
    executions              how a node executes plans
       ▲
    node  world             what a node's process asks for; the planner and all nodes together
       ▲
    scale  main             one operation on very many nodes; the command

`hoplite_mp.planner` decides and `hoplite_mp.planner.program` derives, as in a cluster. Their
surroundings (nodes, the manager's loop, the network) are imitated here, as far as they take part in
one operation in which nothing fails. Faults are simulated with real nodes, in `cluster/`, which
uses only timeline and network from this folder.

A run is deterministic, because nothing here asks the system for anything, except for the time that
the planner takes, which is shown and has no influence on the run.
"""
