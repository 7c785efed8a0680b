"""Queues, locks, semaphores, events, conditions and barriers between processes of all hosts.

Those of `multiprocessing` can only be inherited by children of one process. These are actors: one
process makes all decisions, and its handles can be sent to other processes like every handle of an
actor. No call waits inside the actor: a caller that has to wait receives a promise
(`_client/promises.py`), and waits for that as for any object, so another worker takes the place of
a waiting one, and an event loop goes on.

    waiting            the tables of one queue, or of one lock's permits, which make all decisions
    sync_actors        the objects in the actors' processes: tables, promises, deaths
    sync_async_driver  runs the same methods for threads and for event loops
    handles            the parts that all handles share: making, finding, pickling
    queues             Queue
    locks              Lock, RLock, Semaphore, BoundedSemaphore and Event
    conditions         Condition and Barrier
"""
