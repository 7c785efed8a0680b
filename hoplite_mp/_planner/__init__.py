"""Decides which node takes part in which operation, as a pure function of messages and time:
`Planner.step(message, now)`.

    membership  topology  cost  packing  program   living nodes, their links; the model; edges
           ▲
    stripe_plan  directory  repair                 shapes of plans, holders of objects
           ▲
    broadcast  operation  reduce  groups           what runs
           ▲
    planner_core  step_result                      messages in, plans out

There is no clock, socket, thread or randomness in here: time is an argument, and the returned
StepResult contains what is to be done.
"""
