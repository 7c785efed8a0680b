"""Queues, locks, semaphores, events, conditions and barriers between processes of all hosts.

The objects of `multiprocessing` can only be inherited by children of one process. The objects of
this package are actors: one process makes all decisions, and the handles can be sent to other
processes like the handles of any actor. No call waits inside the actor. A caller that has to wait
receives a promise (`_sync/sync_actors.py`), and waits for the promise as for any object. So another
worker stands in for a waiting worker, and event loops are not blocked.

    waiting      the tables of one queue, or of one lock's permits, which make all decisions
    sync_actors  the objects in the actors' processes: tables, promises, deaths
    handles      what all handles share; runs the same methods for threads and for event loops
    queues       Queue
    locks        Lock, RLock, Semaphore, BoundedSemaphore and Event
    conditions   Condition and Barrier
"""
