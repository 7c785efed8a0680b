# A client's Python objects: holds, read-only views of sealed payloads, writable blocks.

cdef extern from "unistd.h" nogil:
    long sysconf(int)
    int _SC_PAGESIZE
cdef extern from "shm_file.h" nogil:
    int file_enter(shm_file *)
    int file_is_ours(shm_file *)
    void file_leave(shm_file *)

# They refer only to the client, which refers to none of them, so they are in no cycle. With cyclic
# collection, a garbage cycle with one of them would clear its client before it could release.

@cython.final
@cython.no_gc
cdef class Hold:
    """One hold on an object, dropped at deallocation, by atomics only."""
    cdef Client client
    cdef readonly uint64_t oid
    cdef bint draft  # no other process knows this header yet: it ends with this hold

    def __dealloc__(self):
        if self.client is not None:
            with cython.critical_section(self.client):
                if self.draft and self.client.map.usable():
                    cancel_task(self.client.c, self.oid, 0)
                self.client.release_ref(self.oid)

    def keep(self) -> None:
        """The draft is in use: dropping this hold no longer cancels it."""
        self.draft = False

    @property
    def host_id(self) -> int:
        """The host whose tables have the object."""
        return self.client.host_id


@cython.final
@cython.no_gc
cdef class Private:
    """A writable buffer over pages of the store that become private to this process when it writes
    to them. It keeps the object pinned, because unwritten pages are the store's."""
    cdef char *area
    cdef uint64_t skipped   # of the first page
    cdef Py_ssize_t size
    cdef object pin

    def __dealloc__(self):
        if self.area != NULL:
            munmap(self.area, self.skipped + self.size)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.area + self.skipped, self.size, 0, flags)

    def __len__(self) -> int:
        return self.size


@cython.final
@cython.no_gc
cdef class View:
    """A read-only buffer over a sealed payload. It pins the object while it lives."""
    cdef Client client
    cdef readonly uint64_t oid
    cdef char *address
    cdef Py_ssize_t size

    def __dealloc__(self):
        if self.client is not None:
            with cython.critical_section(self.client):
                self.client.unpin(self.oid)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        # A forked child may continue to read the parent's pins.
        PyBuffer_FillInfo(buffer, self, self.address, self.size, 1, flags)

    def __len__(self) -> int:
        return self.size

    def private(self, part):
        """A writable buffer without a copy over the bytes of `part`, a buffer over some of this
        payload. The kernel copies each page at the first write, for this process alone. None: the
        store's file is closed, or the kernel refuses (it limits mappings)."""
        cdef Private made = Private.__new__(Private)
        cdef Mapping map = self.client.map
        cdef Py_buffer seen
        cdef uint64_t start, skipped
        cdef void *area
        PyObject_GetBuffer(part, &seen, PyBUF_SIMPLE)
        start = <uint64_t>(<char *>seen.buf - map.store)
        made.size = seen.len
        PyBuffer_Release(&seen)
        if start < <uint64_t>(self.address - map.store) or \
                start + made.size > <uint64_t>(self.address - map.store) + self.size:
            raise ValueError("these bytes are not part of this payload")
        if not made.size or not map.usable() or not file_enter(&map.file):
            return None
        skipped = start % <uint64_t>sysconf(_SC_PAGESIZE)
        area = MAP_FAILED
        if file_is_ours(&map.file):
            area = mmap(NULL, skipped + made.size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_NORESERVE, map.file.fd, start - skipped)
        file_leave(&map.file)
        if area == MAP_FAILED:
            return None
        made.area = <char *>area
        made.skipped = skipped
        made.pin = part
        madvise(area, skipped + made.size, MADV_DONTDUMP)
        return made


@cython.final
@cython.no_gc
cdef class Lease:
    """A LEASED block that is not an object yet; returned at deallocation."""
    cdef Client client
    cdef readonly uint64_t payload
    cdef bint gone         # it belongs to an object or a Block

    def __dealloc__(self):
        if self.client is not None and not self.gone:
            with cython.critical_section(self.client):
                if self.client.map.usable():
                    self.client.give_block(self.payload, BLOCK_LEASED)

    cdef int check(self) except -1:
        if self.gone:
            raise ValueError("the block is no longer leased here")
        return 0

    def detach(self) -> int:
        """Its payload, which the caller must return from now on."""
        self.gone = True
        return self.payload


@cython.final
@cython.no_gc
cdef class Block:
    """A writable buffer over a leased block. Becomes an object by publish(), or is freed."""
    cdef Client client
    cdef readonly uint64_t payload
    cdef Py_ssize_t size
    cdef uint64_t oid      # the object it has become; 0 = none
    cdef bint lent         # until recall()
    cdef public uint32_t prefix  # where an array that fills the rest begins; 0: none
    cdef bint gone         # nothing left to return

    def __dealloc__(self):
        if self.client is None or self.gone:
            return
        self.client.live_leases.pop(<uint64_t><void *>self, None)
        with cython.critical_section(self.client):
            if not self.client.map.usable():
                pass
            elif self.oid:
                self.client.unpin(self.oid)
            else:
                self.client.give_block(self.payload, BLOCK_LEASED)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.client.map.store + self.payload, self.size,
                          self.oid != 0, flags)

    def __len__(self) -> int:
        return self.size

    @property
    def published(self) -> int:
        """The local id of this block's object; 0 if it has none."""
        return self.oid

    def publish(self) -> Hold:
        """A sealed object over the whole block: client.put() and become() in one step."""
        with cython.critical_section(self, self.client):
            return self.publish_as(KIND_PUT)

    cdef Hold publish_as(self, unsigned kind):
        if self.oid:
            raise ValueError("the block is already an object")
        # Pinned before it is sealed, because a node that is short of memory spills unpinned
        # objects.
        cdef Hold hold = self.client.put_at(kind, self.payload, self.size, False, True)
        self.oid = hold.oid
        return hold

    def lend(self) -> Hold:
        """As publish(), until recall(): others may read the block meanwhile. A reader that ends
        wakes this client."""
        with cython.critical_section(self, self.client):
            if not self.oid:
                self.lent = True
            return self.publish_as(KIND_LENT)

    @property
    def is_lent(self) -> bool:
        return self.lent

    def recall(self) -> bool:
        """Ends lend() if the block has no readers; False: it has. Afterwards (or if the object was
        deleted, which keeps the block) no process can begin to read."""
        with cython.critical_section(self, self.client):
            return self.end_lend()

    cdef bint end_lend(self) noexcept:
        cdef uint64_t oid = self.oid
        cdef int found
        if not self.lent or not self.client.map.usable():
            return True
        if self.client.pins[ID_TABLE(oid)][ID_INDEX(oid)] != 1:
            return False  # this process itself has another reader
        found = take_back(self.client.c, self.client.map.store, oid, self.client.slot)
        if found == 0:
            return False
        self.lent = False
        if found == 1:
            self.oid = 0
            self.client.unpin(oid)
        return True

    def become(self, uint64_t oid) -> None:
        """The bytes are now the object's: this buffer holds a pin in place of the lease."""
        self.client.check(oid)
        with cython.critical_section(self, self.client):
            if self.oid:
                raise ValueError("the block is already an object")
            self.client.pin_own(oid)
            self.oid = oid

    def unbecome(self) -> None:
        """The result did not count: the block is this process's again."""
        cdef uint64_t oid
        with cython.critical_section(self, self.client):
            oid = self.oid
            self.oid = 0
            CAS64(&block_of(self.client.map.store, self.payload).owner, oid, BLOCK_LEASED)
            self.client.unpin(oid)
