"""Explores every interleaving of a few processes over shared words, with a kill at every step.

A test that runs processes sees a few of the orders in which their instructions can fall; a protocol
without locks is wrong in the others. Here a process is a generator that yields one atomic operation
at a time, and the explorer visits every state that any order, and any kill between two operations,
can reach. It goes breadth-first, so that the interleaving it reports is a shortest one.

Generators cannot be copied. A process state is therefore named by its frames (code position and
local variables of the whole `yield from` chain) and rebuilt, when needed, by running the program
again with the results it had seen; each (state, result) is run once and remembered. What is named
by frames must live in frames: a program keeps no value on the stack across a yield, so an operation
stands alone in its statement, and a `for` around a yield runs over distinct values. `exact=True`
names states by the results instead, which needs no such care and is slower; a test compares both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Iterable

Memory = tuple[int, ...]
MASK = (1 << 64) - 1


class Violation(AssertionError):
    """A promise of the protocol is broken; raised by a program or by an invariant."""


@dataclass(frozen=True)
class Op:
    """One atomic step: takes the memory, gives the new one and the result for the process."""

    name: str
    run: Callable[[Memory], tuple[Memory, int]]
    ready: Callable[[Memory], bool] | None = None
    idle: bool = False  # a process waiting here for ever is at rest, not stuck
    ghost: bool = False  # bookkeeping of the model: happens together with the step before


def put(memory: Memory, address: int, value: int) -> Memory:
    return (*memory[:address], value & MASK, *memory[address + 1 :])


def load(address: int) -> Op:
    return Op(f"load {address}", lambda m: (m, m[address]))


def store(address: int, value: int) -> Op:
    return Op(f"store {address} {value:#x}", lambda m: (put(m, address, value), 0))


def fetch_or(address: int, bits: int) -> Op:
    return Op(f"or {address} {bits:#x}", lambda m: (put(m, address, m[address] | bits), m[address]))


def fetch_and(address: int, bits: int) -> Op:
    return Op(
        f"and {address} {bits:#x}", lambda m: (put(m, address, m[address] & bits), m[address])
    )


def fetch_add(address: int, amount: int) -> Op:
    return Op(
        f"add {address} {amount:#x}", lambda m: (put(m, address, m[address] + amount), m[address])
    )


def exchange(address: int, value: int) -> Op:
    return Op(f"exchange {address} {value:#x}", lambda m: (put(m, address, value), m[address]))


def cas(address: int, old: int, new: int) -> Op:
    """The result is 1 for success and 0 for another word."""

    def run(memory: Memory) -> tuple[Memory, int]:
        if memory[address] != old:
            return memory, 0
        return put(memory, address, new), 1

    return Op(f"cas {address} {old:#x} -> {new:#x}", run)


def wait(ready: Callable[[Memory], bool], name: str, *, idle: bool = False) -> Op:
    return Op(f"wait {name}", lambda m: (m, 0), ready=ready, idle=idle)


def ghost(address: int, value: int) -> Op:
    return Op(f"ghost {address} {value:#x}", lambda m: (put(m, address, value), 0), ghost=True)


def ghost_add(address: int, amount: int) -> Op:
    return Op("ghost", lambda m: (put(m, address, m[address] + amount), m[address]), ghost=True)


def look(address: int) -> Op:
    """Private memory of the process, or bookkeeping: reading it is no step."""
    return Op("look", lambda m: (m, m[address]), ghost=True)


@dataclass(frozen=True)
class Process:
    """A program of a client slot; `sweep` is what the node runs after it was killed."""

    name: str
    slot: int
    program: Callable[[], Generator[Op, int, Any]]
    sweep: Callable[[], Generator[Op, int, Any]] | None = None  # None: never killed


@dataclass
class Scenario:
    """A small world to explore, with what must hold in every state and at rest.

    `invariant(memory)` and `final(memory, dead slots)` raise Violation. `finale(dead slots)` runs
    alone when everything is at rest: it drains what the owners still have to collect.
    """

    name: str
    memory: Memory
    processes: list[Process]
    invariant: Callable[[Memory], None]
    finale: Callable[[frozenset[int]], Generator[Op, int, Any]] | None = None
    final: Callable[[Memory, frozenset[int]], None] | None = None
    on_kill: Callable[[Memory, int], Memory] = lambda memory, slot: memory
    kills: int = 1
    names: dict[int, str] = field(default_factory=dict)


@dataclass
class Outcome:
    scenario: str
    states: int
    memories: int
    rests: int
    violation: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.scenario}: {self.states} states, {self.memories} memories"
        return "\n".join([head, *([self.violation] if self.violation else []), *self.trace])


class _Locals:
    """The states of all processes, numbered; steps between them, remembered."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._numbers: dict[Hashable, int] = {}
        self._starts: dict[Hashable, int] = {}
        self._history: list[tuple[Callable[[], Generator[Op, int, Any]], tuple[int, ...]]] = []
        self.ops: list[Op | None] = []  # None: the program has ended
        self.broken: dict[int, str] = {}  # the program raised Violation on its way to this state
        self._next: dict[tuple[int, int], int] = {}

    def start(self, tag: Hashable, program: Callable[[], Generator[Op, int, Any]]) -> int:
        if tag not in self._starts:
            self._starts[tag] = self._reach(program, ())
        return self._starts[tag]

    def step(self, number: int, result: int) -> int:
        following = self._next.get((number, result))
        if following is None:
            program, history = self._history[number]
            following = self._next[number, result] = self._reach(program, (*history, result))
        return following

    def _reach(
        self, program: Callable[[], Generator[Op, int, Any]], history: tuple[int, ...]
    ) -> int:
        generator = program()
        op: Op | None = None
        broken = None
        try:
            op = next(generator)
            for result in history:
                op = generator.send(result)
        except StopIteration:
            op = None
        except Violation as error:
            op, broken = None, str(error)
        key: Hashable
        if op is None:
            key = (program, "end", broken)
        else:
            key = (program, history) if self._exact else (program, *_frames(generator))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.ops)
            self.ops.append(op)
            self._history.append((program, history))
            if broken is not None:
                self.broken[number] = broken
        return number


def _frames(generator: Any) -> Iterable[Hashable]:
    while generator is not None:
        frame = generator.gi_frame
        yield frame.f_code, frame.f_lasti, tuple(sorted(frame.f_locals.items(), key=_first))
        generator = generator.gi_yieldfrom


def _first(item: tuple[str, Any]) -> str:
    return item[0]


_DEAD = -1
State = tuple[int, ...]  # memory number, kills left, then a local number for process and sweep


class Explorer:
    """Visits all states of a scenario; stops at the first violation."""

    def __init__(self, scenario: Scenario, *, exact: bool = False, limit: int = 2_000_000) -> None:
        self.scenario = scenario
        self.limit = limit
        self.locals = _Locals(exact=exact)
        self.memories: list[Memory] = []
        self._memory_numbers: dict[Memory, int] = {}
        self._parents: dict[State, State | None] = {}
        self._rests = 0

    def _remember(self, memory: Memory) -> int:
        number = self._memory_numbers.get(memory)
        if number is None:
            number = self._memory_numbers[memory] = len(self.memories)
            self.memories.append(memory)
        return number

    def run(self) -> Outcome:
        scenario = self.scenario
        count = len(scenario.processes)
        locals_ = [self.locals.start(i, p.program) for i, p in enumerate(scenario.processes)]
        memory = self._remember(scenario.memory)
        start: State = (memory, scenario.kills, *locals_, *([_DEAD] * count))
        self._parents[start] = None
        queue = deque([start])
        checked = -1
        while queue:
            state = queue.popleft()
            try:
                if state[0] > checked:  # memories are numbered in the order of their discovery
                    for number in range(checked + 1, state[0] + 1):
                        scenario.invariant(self.memories[number])
                    checked = state[0]
                moves = self._moves(state)
            except Violation as error:
                return self._outcome(str(error), state)
            for _label, following in moves:
                if following not in self._parents:
                    self._parents[following] = state
                    queue.append(following)
            if len(self._parents) > self.limit:
                return self._outcome(f"more than {self.limit} states", state)
        return self._outcome(None, start)

    def _moves(self, state: State) -> list[tuple[str, State]]:
        scenario, ops = self.scenario, self.locals.ops
        memory = self.memories[state[0]]
        count = len(scenario.processes)
        moves: list[tuple[str, State]] = []
        stuck: list[str] = []
        for place in range(2, 2 + 2 * count):
            number = state[place]
            if number == _DEAD:
                continue
            if number in self.locals.broken:
                raise Violation(f"{self._who(place)}: {self.locals.broken[number]}")
            op = ops[number]
            if op is None:
                continue
            if op.ready is None or op.ready(memory):
                after, result = op.run(memory)
                following, seen = self.locals.step(number, result), result
                while (fused := ops[following]) is not None and fused.ghost:
                    after, result = fused.run(after)
                    following = self.locals.step(following, result)
                new = list(state)
                new[0], new[place] = self._remember(after), following
                moves.append((f"{self._who(place)}: {op.name} = {seen:#x}", tuple(new)))
            elif not op.idle:
                stuck.append(f"{self._who(place)} at {op.name}")
        if not moves:
            self._rest(state, stuck)
        if state[1]:
            for place in range(2, 2 + count):
                process = scenario.processes[place - 2]
                alive = state[place] != _DEAD and ops[state[place]] is not None
                if process.sweep is not None and alive:
                    new = list(state)
                    new[0] = self._remember(scenario.on_kill(memory, process.slot))
                    new[1] -= 1
                    new[place] = _DEAD
                    new[place + count] = self.locals.start(("sweep", place), process.sweep)
                    moves.append((f"{process.name} is killed", tuple(new)))
        return moves

    def _rest(self, state: State, stuck: list[str]) -> None:
        scenario = self.scenario
        self._rests += 1
        if stuck:
            raise Violation(f"waits for ever: {', '.join(stuck)}")
        dead = self._dead(state)
        memory = self.memories[state[0]]
        if scenario.finale is not None:
            memory = run_alone(scenario.finale(dead), memory)
            scenario.invariant(memory)
        if scenario.final is not None:
            scenario.final(memory, dead)

    def _dead(self, state: State) -> frozenset[int]:
        processes = self.scenario.processes
        return frozenset(p.slot for i, p in enumerate(processes) if state[2 + i] == _DEAD)

    def _who(self, place: int) -> str:
        count = len(self.scenario.processes)
        name = self.scenario.processes[(place - 2) % count].name
        return name if place < 2 + count else f"node after {name}"

    def _outcome(self, violation: str | None, state: State) -> Outcome:
        outcome = Outcome(
            self.scenario.name, len(self._parents), len(self.memories), self._rests, violation
        )
        if violation is not None:
            outcome.trace = self._trace(state)
        return outcome

    def _trace(self, state: State) -> list[str]:
        path = [state]
        while (parent := self._parents[path[-1]]) is not None:
            path.append(parent)
        path.reverse()
        lines = []
        for before, after in pairwise(path):
            label = next(label for label, following in self._moves(before) if following == after)
            kind, _, rest = label.partition(": ")
            words = [self.scenario.names.get(int(w), w) if w.isdigit() else w for w in rest.split()]
            lines.append(f"  {kind}: {' '.join(words)}" if rest else f"  {kind}")
        memory = self.memories[state[0]]
        names = self.scenario.names
        lines.append(
            "  memory: " + " ".join(f"{names.get(i, i)}={v:#x}" for i, v in enumerate(memory) if v)
        )
        return lines


def run_alone(program: Generator[Op, int, Any], memory: Memory) -> Memory:
    """Runs a program with nobody beside it; a wait that is not ready ends it."""
    try:
        op = next(program)
        while op.ready is None or op.ready(memory):
            memory, result = op.run(memory)
            op = program.send(result)
    except StopIteration:
        pass
    return memory


def explore(scenario: Scenario, *, exact: bool = False, limit: int = 2_000_000) -> Outcome:
    return Explorer(scenario, exact=exact, limit=limit).run()
