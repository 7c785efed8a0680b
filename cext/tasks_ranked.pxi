# Tasks with a priority, or with resources: their hints stand in bags.

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
        """Says which priority a ranked task has, and the level of the task that has sent it
        (NO_FLOOR: no task has), before it is posted."""
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        r.priority = priority
        r.floor = floor

    def ranks(self, uint64_t oid) -> tuple[int, int]:
        """(priority, floor) of a task; (0, NO_FLOOR) of one that is not ranked."""
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
        """Counts changes of what the cluster's nodes have."""
        return LOAD32(&root_of(self.c).resources)

    def resources_changed(self) -> None:
        """The node: a node has come, or is gone."""
        ADD32(&root_of(self.c).resources, 1)
