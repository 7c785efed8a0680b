"""Decides which node takes part in which operation. The decisions depend only on messages and
times, which are passed to `Planner.step(message, now)`.

    membership  link_speeds  cost  packing  program   living nodes and links; cost model; programs
           ▲
    tree_shapes  directory  repair  plan_log       shapes of plans, holders of objects, records
           ▲
    broadcast  operation  reduce  groups           running operations and Groups
           ▲
    planner_core  step_result                      handlers of messages, and their results

This package has no clock, sockets, threads or randomness: the time is an argument, and the returned
StepResult contains the actions.
"""
