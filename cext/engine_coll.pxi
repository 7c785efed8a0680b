# The part of Engine for small calls of Groups. engine_coll.h has the protocol.


@cython.no_gc
cdef class _EngineCalls:
    """Requests to an engine about small calls. All are posted, and answered by events."""

    cdef engine_t *engine
    cdef int fork_mark
    cdef object memory  # the memory of the boards

    cdef int check(self) except -1:
        if self.fork_mark != fork_count:
            raise RuntimeError("the engine belongs to the process that this one was forked from")
        if self.engine == NULL:
            raise RuntimeError("the engine was stopped")
        return 0

    cdef coll_request *request(self, int kind, uint64_t generation) except NULL:
        self.check()
        cdef coll_request *asked = <coll_request *> engine_memory(sizeof(coll_request))
        asked.kind = kind
        asked.generation = generation
        asked.fd = -1
        return asked

    def coll_add(self, generation: int, size: int, node: int, client, board: int) -> None:
        """Adds a Group with members on this host, whose board is in the control memory of `client`.

        Python owns its calls until coll_open(). Parts published by members here arrive as
        COLL_PART.
        """
        cdef uint64_t address = client.control_address
        if not 1 <= size <= MEMBERS:
            raise ValueError(f"a group of {size} members")
        if not 0 <= board < BOARDS:
            raise ValueError(f"board {board}: there are {BOARDS}")
        self.add(generation, size, node, client, address, board)

    @cython.critical_section
    cdef int add(self, uint64_t generation, uint32_t size, uint32_t node, object client,
                 uint64_t address, uint32_t board) except -1:
        cdef coll_request *asked = self.request(COLL_ASK_ADD, generation)
        self.memory = client
        asked.size = size
        asked.node = node
        asked.control = <char *> address
        asked.board = board
        engine_post_coll(self.engine, asked)
        return 0

    @cython.critical_section
    def coll_open(self, generation: int, version: int, call: int, nodes) -> None:
        """The engine owns the calls from this one on. `nodes`: by rank; None: no node.

        Ends with COLL_TAKEN.
        """
        cdef list numbers = list(nodes)
        if len(numbers) > MEMBERS:
            raise ValueError(f"{len(numbers)} ranks exceed the {MEMBERS} of a board")
        cdef uint64_t version_word = version
        cdef uint64_t call_word = call
        cdef coll_request *asked = self.request(COLL_ASK_OPEN, generation)
        cdef Py_ssize_t i
        asked.version = version_word
        asked.call = call_word
        for i in range(MEMBERS):
            number = numbers[i] if i < len(numbers) else None
            asked.node_of[i] = <uint32_t> COLL_NOBODY if number is None else <uint32_t> number
        engine_post_coll(self.engine, asked)

    @cython.critical_section
    def coll_close(self, generation: int) -> None:
        """The freeze: no call is committed between COLL_TAKEN and coll_open()."""
        engine_post_coll(self.engine, self.request(COLL_ASK_CLOSE, generation))

    @cython.critical_section
    def coll_yield(self, generation: int, call: int) -> None:
        """Gives the calls from this one on to Python, unless this node has already given its parts
        of the call: then it is committed, or another node yields it."""
        cdef uint64_t word = call
        cdef coll_request *asked = self.request(COLL_ASK_YIELD, generation)
        asked.call = word
        engine_post_coll(self.engine, asked)

    @cython.critical_section
    def coll_forget(self, generation: int) -> None:
        """The Group has ended."""
        engine_post_coll(self.engine, self.request(COLL_ASK_FORGET, generation))

    @cython.critical_section
    def coll_begin(self, generation: int, call: int, plan: int) -> None:
        """Python moves the bytes of a call that the engine owns. Nodes with the same plan pass the
        same number, which has 32 bits and is not 0."""
        self.about_plan(COLL_ASK_BEGIN, generation, call, plan)

    @cython.critical_section
    def coll_vote(self, generation: int, call: int, plan: int) -> None:
        """This node has received all its bytes of the call. The call is committed when all nodes
        have voted for the same plan, and coll_result() was called: COLL_MOVED."""
        self.about_plan(COLL_ASK_VOTE, generation, call, plan)

    cdef int about_plan(self, int kind, uint64_t generation, uint64_t call,
                        uint32_t plan) except -1:
        if not plan:
            raise ValueError("plan must not be 0")
        cdef coll_request *asked = self.request(kind, generation)
        asked.call = call
        asked.plan = plan
        engine_post_coll(self.engine, asked)
        return 0

    @cython.critical_section
    def coll_result(self, generation: int, call: int, result: int, awaited: bool = False) -> None:
        """The object (not 0) that members here must read as the call's result. awaited: a member
        waits for COLL_MOVED, which otherwise comes some milliseconds later."""
        cdef uint64_t call_word = call
        cdef uint64_t result_word = result
        if not result_word:
            raise ValueError("result must not be 0")
        cdef coll_request *asked = self.request(COLL_ASK_RESULT, generation)
        asked.call = call_word
        asked.result = result_word
        asked.awaited = bool(awaited)
        engine_post_coll(self.engine, asked)

    @cython.critical_section
    def coll_frame(self, generation: int, node: int, version: int, call: int, phase: int,
                    plan: int, parts: bytes) -> None:
        """A frame from COLL_SEND of that node."""
        cdef uint32_t sender = node
        cdef uint64_t version_word = version
        cdef uint64_t call_word = call
        cdef unsigned char phase_word = phase
        cdef uint32_t plan_word = plan
        cdef Py_ssize_t nbytes = len(parts)
        if nbytes > FRAME_COLL_BYTES_MAX:
            raise ValueError(f"a small call's frame of {nbytes} bytes")
        cdef coll_request *asked = self.request(COLL_ASK_FRAME, generation)
        asked.node = sender
        asked.version = version_word
        asked.call = call_word
        asked.phase = phase_word
        asked.plan = plan_word
        asked.nbytes = nbytes
        asked.bytes = <char *> engine_memory(nbytes)
        memcpy(asked.bytes, <const char *> parts, nbytes)
        engine_post_coll(self.engine, asked)

    @cython.critical_section
    def coll_doorbell(self, generation: int, rank: int, fd: int) -> None:
        """The eventfd to which the member of that rank writes. The engine takes it over."""
        cdef uint32_t place = rank
        cdef coll_request *asked = self.request(COLL_ASK_BELL, generation)
        asked.size = place
        asked.fd = fd
        engine_post_coll(self.engine, asked)

    @cython.critical_section
    def coll_look(self) -> None:
        """Checks all boards, for an engine without a thread, which watches no doorbell."""
        engine_post_coll(self.engine, self.request(COLL_ASK_LOOK, 0))

    def is_quiet(self) -> bool:
        """For an engine without a thread: whether all events in events() may be delayed."""
        self.check()
        return self.engine.events != NULL and not self.engine.signalled

    cdef tuple coll_event(self, event_t *event):
        cdef bytes data = PyBytes_FromStringAndSize(event.bytes, event.nbytes) \
            if event.nbytes else b""
        if event.kind == EVENT_COLL_SEND:
            return (event.kind, event.number, event.peer, event.version, event.call,
                    event.phase, event.plan, data)
        return (event.kind, event.number, event.call, data)
