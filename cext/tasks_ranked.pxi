# Tasks with a priority, or with resources: their hints are in bags.

cdef extern from "shm_bag.h" nogil:
    enum:
        BAG
        RECORD_RANKED
        RECORD_RESOURCES
    int32_t FLOOR_NONE
    void bag_open(char *, unsigned, unsigned)
cdef extern from "shm_tasks.h" nogil:
    int queue_post_ranked(char *, unsigned, uint64_t)

RANKED_FLAG, RESOURCES_FLAG = RECORD_RANKED, RECORD_RESOURCES
RANKED_HINTS_MAX = BAG
NO_FLOOR = FLOOR_NONE


@cython.final
cdef class Ranked:
    """The bags of one client."""
    cdef char *c
    cdef Tasks tasks

    def __cinit__(self, Tasks tasks):
        self.c = tasks.c
        self.tasks = tasks

    def open_bag(self, unsigned pool, bint here=False) -> int:
        """As Tasks.open_queue(), for ranked tasks."""
        cdef unsigned queue = self.tasks.open_queue(pool, here)
        bag_open(self.c, queue, pool)
        return queue

    def rank(self, uint64_t oid, int32_t priority, int32_t floor) -> None:
        """Sets a ranked task's priority, and the level of the task that sent it (NO_FLOOR: none),
        before it is posted."""
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        r.priority = priority
        r.floor = floor

    def ranks(self, uint64_t oid) -> tuple[int, int]:
        """(priority, floor) of a task; (0, NO_FLOOR) if it is not ranked."""
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        if not r.flags & RECORD_RANKED:
            return 0, NO_FLOOR
        return r.priority, r.floor

    def post(self, uint64_t oid, unsigned bag) -> bool:
        """As Tasks.post()."""
        check(oid)
        with cython.critical_section(self.tasks):
            change_state(self.c, oid, ST_WAITING, ST_QUEUED, -1, -1)
            return queue_post_ranked(self.c, bag, oid)

    @property
    def resources_version(self) -> int:
        """Counts changes of the resources of the cluster's nodes."""
        return LOAD32(&root_of(self.c).resources)

    def resources_changed(self) -> None:
        """For the node: a node has joined, or is gone."""
        ADD32(&root_of(self.c).resources, 1)
