"""The real planner and the real programs on a virtual network, in virtual time.

    timeline  contents                    when things happen; who is in which byte
       ▲
    network   memory                      links with rates and delays; memory that knows its bytes
       ▲
    streams                               cells, pulls, serves and folds of one node, by the rule
       ▲
    places  copies  parts  asks  keeping  returning   what a node makes of plans, and says of them
       ▲
    host                                  one life of a node
       ▲
    manager  world                        the planner's surroundings; everything together
       ▲
    faults  workload  checks              what happens to it, and what must hold whatever does
       ▲
    runs  scale  main                     one seed; one operation on many nodes; the command

`hoplite_mp.planner` decides and `hoplite_mp.planner.program` derives, as they do in a cluster. What
is imitated here is what surrounds them: nodes, whose real code works on shared memory and sockets
(`hoplite_mp/node/`), the manager's loop and the network. Calls of Groups are not in it: they ask no
manager, and the code of nodes that decides them is not separate from their sockets.

One seed replays a run exactly: nothing here asks the system for anything, but how long the planner
took, which is shown and has no influence.
"""
