# The Python interface of engine_driven.c, for the two threads that move the bytes of a link.


@cython.no_gc
@cython.final
cdef class Driver:
    """A link over TLS, made by Engine.drive(). One thread sends, another one receives.

        while True:                                     while True:
            frame = driver.next_frame(1.0)                  place = driver.receive_into(1.0)
            if frame is not None:                           if place is not None:
                for part in frame:                              n = tls.recv_into(place)
                    tls.sendall(part)                           driver.received(n)
                driver.sent()

    The thread owns a part or place until sent() or received(): its cell is CLOSED only afterwards.
    After the link's end all methods raise ConnectionError with the reason. A thread that fails by
    itself calls received(0), or disconnect(driver.link) and then sent(). Dropping the last
    reference ends the link.
    """

    cdef Engine engine
    cdef _Joined joined
    cdef readonly uint64_t link
    cdef bint frame_out, place_out
    cdef int place_kind
    cdef uint32_t place_bytes, place_done
    cdef object block, place, header, scratch

    def __dealloc__(self):
        if self.joined is not None:
            with cython.critical_section(self.engine):
                self.leave()

    cdef void leave(self) noexcept:
        if self.engine.engine == NULL or self.engine.fork_mark != fork_count:
            return
        if not self.joined.lost:
            self.engine.post(COMMAND_DISCONNECT, NULL, self.joined.link)
        if self.frame_out:
            self.engine.post(COMMAND_SENT, NULL, self.joined.link)
        if self.place_out:
            self.engine.post(COMMAND_RECEIVED, NULL, self.joined.link)
        self.joined.driven = False
        if self.joined.lost:
            self.engine.post(COMMAND_FREE, NULL, self.joined.link)

    cdef int check(self) except -1:
        if self.joined is None:
            raise TypeError("use Engine.drive()")
        return self.engine.check()

    cdef engine_t *enter(self) except NULL:
        """The engine, which is not freed before the end of this thread's wait."""
        with cython.critical_section(self.engine):
            self.engine.check()
            driven_enter(self.engine.engine)
            return self.engine.engine

    cdef int post(self, int kind, uint32_t amount) except -1:
        with cython.critical_section(self.engine):
            self.engine.check()
            engine_post(self.engine.engine, kind, NULL, self.joined.link, NULL, NULL, amount)
        return 0

    def next_frame(self, timeout: float) -> list[bytes | memoryview] | None:
        """The parts of the next frame: the header, and its block if any. None: timeout (in
        seconds)."""
        cdef frame_t frame
        cdef uint64_t cell = 0
        cdef char *small = NULL
        cdef char reason[REASON_BYTES]
        cdef double seconds = check_timeout(timeout)
        cdef int found
        cdef engine_t *engine
        cdef link_t *link
        cdef Py_ssize_t at
        self.check()
        if self.frame_out:
            raise RuntimeError("sent() was not called for the previous frame")
        engine, link = self.enter(), self.joined.link
        with nogil:
            found = driven_wait_frame(engine, link, seconds, &frame, &cell, &small,
                                      reason)
        self.check()
        if found < 0:
            raise ConnectionError(reason.decode())
        if not found:
            return None
        self.frame_out = True
        header = PyBytes_FromStringAndSize(<char *> &frame, FRAME_BYTES)
        if not frame.length:
            return [header]
        if small != NULL:
            self.block = PyBytes_FromStringAndSize(small, frame.length)
            free(small)
            return [header, self.block]
        at = frame.offset
        self.block = memoryview(self.engine.held[cell])[at : at + <Py_ssize_t> frame.length]
        return [header, self.block]

    def sent(self) -> None:
        """All parts of the frame were sent, and are no longer read."""
        self.check()
        if not self.frame_out:
            raise RuntimeError("no frame is being sent")
        self.frame_out, self.block = False, None
        self.post(COMMAND_SENT, 0)

    def receive_into(self, timeout: float) -> memoryview | None:
        """Memory for the next bytes of the stream, at least one. None: timeout (in seconds)."""
        cdef uint64_t cell = 0
        cdef uint64_t offset = 0
        cdef char reason[REASON_BYTES]
        cdef double seconds = check_timeout(timeout)
        cdef int found
        cdef engine_t *engine
        cdef link_t *link
        self.check()
        if not self.place_out:
            engine, link = self.enter(), self.joined.link
            with nogil:
                found = driven_wait_place(engine, link, seconds, &self.place_kind,
                                          &self.place_bytes, &cell, &offset, reason)
            self.check()
            if found < 0:
                raise ConnectionError(reason.decode())
            if not found:
                return None
            self.place_out, self.place_done = True, 0
            if self.place_kind == PLACE_CELL:
                whole = memoryview(self.engine.held[cell])[<Py_ssize_t> offset :]
            else:
                whole = memoryview(self.header if self.place_kind == PLACE_HEADER else self.scratch)
            self.place = whole[: <Py_ssize_t> self.place_bytes]
        return self.place[self.place_done :]

    def received(self, nbytes: int) -> None:
        """This many bytes of the place were written; 0: the stream has ended."""
        cdef uint32_t amount
        self.check()
        if not self.place_out:
            raise RuntimeError("no place is being written")
        if not 0 <= nbytes <= self.place_bytes - self.place_done:
            raise ValueError(f"{nbytes} bytes exceed the {self.place_bytes - self.place_done} given")
        self.place_done += nbytes
        if nbytes and self.place_done < self.place_bytes:
            return
        amount = self.place_bytes if nbytes else 0
        if amount and self.place_kind == PLACE_HEADER:
            driven_header(self.joined.link, PyByteArray_AS_STRING(self.header))
        if amount and self.place_kind == PLACE_COLL:
            driven_coll(self.joined.link, PyByteArray_AS_STRING(self.scratch), amount)
        self.place_out, self.place = False, None
        self.post(COMMAND_RECEIVED, amount)


cdef double check_timeout(object timeout) except -1:
    cdef double seconds = timeout
    if not 0 <= seconds <= 1e6:
        raise ValueError(f"timeout must be from 0 to 1e6 seconds, not {timeout}")
    return seconds


cdef Driver new_driver(Engine engine, _Joined joined, uint64_t number):
    cdef Driver driver = Driver.__new__(Driver)
    driver.engine, driver.joined, driver.link = engine, joined, number
    driver.header, driver.scratch = bytearray(FRAME_BYTES), bytearray(SCRATCH_BYTES)
    return driver
