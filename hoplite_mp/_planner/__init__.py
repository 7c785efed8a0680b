"""Decides which node takes part in which operation, as a pure function of messages and time:
`Planner.step(message, now)`.

    membership  topology  cost  packing  program   living nodes, their links; the model; edges
           ▲
    stripe_plan  directory  repair  plan_log       shapes of plans, holders of objects, records
           ▲
    broadcast  operation  reduce  groups           what runs
           ▲
    planner_core  step_result                      messages in, plans out

topologies, tree_schedules, multitree and packed_trees compare plans for an allreduce on links that
do not form a star, for `hoplite-mp simulate --topology`. No running cluster uses them.

This package has no clock, sockets, threads or randomness: the time is an argument, and the returned
StepResult contains the actions.
"""
