"""Queues, locks, semaphores, events, conditions and barriers for processes on all hosts.

The objects in `multiprocessing` can only be inherited by children of one process. The objects in
this package are actors: one process makes all decisions, and the handles can be sent to other
processes like the handles of any actor. No call waits inside the actor. A caller that has to wait
receives a promise (see `_sync/sync_actors.py`), and waits for it as it would for any other object.
So a waiting worker is replaced by another worker, and event loops are not blocked.

    waiting      the tables (of a queue's items or a lock's permits) that make all decisions
    sync_actors  the objects in the actors' processes: tables, promises, deaths
    handles      the base class of all handles; runs methods in threads and in event loops
    queues       Queue
    locks        Lock, RLock, Semaphore, BoundedSemaphore and Event
    conditions   Condition and Barrier
"""
