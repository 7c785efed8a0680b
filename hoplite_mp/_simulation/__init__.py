"""The real planner and the real programs on a virtual network, in virtual time.

    timeline   virtual time: a queue of events
    network    links with rates and delays
    scale/     one operation on many simulated nodes, with the real planner
    virtual/   the environment of real nodes, managers and clients in one process
    prediction/ recorded steps of a worker, replayed on many hosts
    workloads/ the programs of a run
    faults/    deaths, cuts and restarts; faults that strike at a message
    oracle/    the invariants that are checked during a run and after it
    runs       one seed: a cluster, its work, its faults, and the verdict

A run is deterministic: nothing in it reads a clock or a random source of the operating
system, except to measure how long the planner takes, which has no influence on the run.
"""
