"""Decides which node takes part in which operation, as a pure function of messages and time:
`Planner.step(message, now)`.

    membership  link_speeds  cost  packing  program   living nodes, their links; the model; edges
           ▲
    tree_shapes  directory  repair  plan_log       shapes of plans, holders of objects, records
           ▲
    broadcast  operation  reduce  groups           what runs
           ▲
    planner_core  step_result                      messages in, plans out

This package has no clock, sockets, threads or randomness: the time is an argument, and the returned
StepResult contains the actions.
"""
