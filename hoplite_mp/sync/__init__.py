"""Queue, Lock, Semaphore and Event: what processes of all hosts wait for each other with.

Why it exists: `multiprocessing`'s own are inherited by children of one process. These are actors:
one process decides who has what, and handles to it travel as every handle of an actor does. Nobody
waits inside the actor: who has to wait gets a promise of it (`client/promises.py`), and waits for
that as for any object, so a waiting worker is stood in for, and an event loop goes on.

    waiting   tables of one queue, or of one lock's permits: who waits, who has what; decides alone
    serving   the objects in the actors' processes: tables, promises, deaths
    steps     one face for threads and for event loops
    handles   what every handle does: making, finding, travelling
    queues    locks   the public classes
"""
