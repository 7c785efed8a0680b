"""Who takes part in what, decided without touching the world: `Planner.step(message, now)`.

    membership topology  cost packing program     who is there, how fast; the model; edges
           ▲
    forest  directory  repair                      shapes of plans, who holds what
           ▲
    broadcast  operation  reduce  group            what runs
           ▲
    machine  plan                                  messages in, plans out

No clock, socket, thread or randomness in here: time is an argument, and what is to be done is the
returned Plan.
"""
