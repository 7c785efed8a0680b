"""Queues, locks, semaphores, events, conditions and barriers between processes of all hosts.

The objects of `multiprocessing` can only be inherited by children of one process. These are actors:
one process makes all decisions, and its handles can be sent to other processes like those of any
actor. No call waits inside the actor: a caller that has to wait receives a promise
(`_sync/sync_actors.py`), and waits for it like for any object, so a waiting worker is replaced, and
event loops are not blocked.

    waiting      the tables of one queue, or of one lock's permits, which make all decisions
    sync_actors  the objects in the actors' processes: tables, promises, deaths
    handles      what all handles share; runs the same methods for threads and for event loops
    queues       Queue
    locks        Lock, RLock, Semaphore, BoundedSemaphore and Event
    conditions   Condition and Barrier
"""
