"""Queues, locks, semaphores, events, conditions and barriers for processes on all hosts.

The objects in `multiprocessing` can only be inherited by children of one process. The objects in
this package are actors: one process makes all decisions, and the handles can be sent to other
processes like the handles of any actor. No call waits inside the actor. A caller that has to wait
receives a promise (`_sync/sync_actors.py`), and waits for the promise as for any object. So another
worker takes the place of a waiting worker, and event loops are not blocked.

    waiting      tables, such as a queue's or the permits of a lock, that make all decisions
    sync_actors  the objects in the actors' processes: tables, promises, deaths
    handles      what all handles share; runs the same methods for threads and for event loops
    queues       Queue
    locks        Lock, RLock, Semaphore, BoundedSemaphore and Event
    conditions   Condition and Barrier
"""
