"""Who takes part in what, decided without touching the world: `Planner.step(message, now)`.

    plan  forest  membership  <-  reduce, group  <-  machine

No clock, socket, thread or randomness in here: time is an argument, and what is to be done is the
returned Plan.
"""
