"""The real planner and the real programs on a virtual network, in virtual time.

    timeline  network       when things happen; links with rates and delays
       ▲
    streams                 cells, pulls, serves and folds of one node, by the rule
       ▲
    truth  host             what must hold of bytes; one node's objects and messages
       ▲
    executions              what a node makes of plans
       ▲
    node  world             what its process asks for; the planner and all nodes together
       ▲
    scale  main             one operation on very many nodes; the command

`hoplite_mp.planner` decides and `hoplite_mp.planner.program` derives, as they do in a cluster. What
surrounds them is imitated here as far as it takes part in one operation in which nothing fails:
nodes, the manager's loop and the network. Faults are played with real nodes, in `cluster/`, which
needs of this folder timeline and network alone.

A run is the same each time: nothing here asks the system for anything, but how long the planner
took, which is shown and has no influence.
"""
