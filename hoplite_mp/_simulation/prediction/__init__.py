"""Predicts the steps per second of a training program from a trace of one worker.

    recording  the steps of one worker, read from its trace
    cores      CPU time that workers, engines and a server share
    links      links that connections share
    play       replays the recorded steps on many simulated hosts, with the shipped node

The method is that of Li, Yan, Paolieri and Golubchik, ICPE 2020: the steps of one worker are
recorded, drawn at random for each worker of a larger cluster, and replayed in a discrete-event
simulation of its network.
"""
