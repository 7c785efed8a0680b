"""Learning in a run: Groups that reduce by robust operators, or exchange compressed arrays.

Ranks die during calls, leave, and are replaced on other hosts, so slices get other owners. Each
result is compared with numpy, over the contributors that the call reports.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import WrongBytes, reduced
from hoplite_mp.errors import PeerLostError, ReduceError
from hoplite_mp.ml._compressors import Float16, PowerSGD, Quantise, RandomBlocks, Threshold, TopK
from hoplite_mp.ml._cser import CSER
from hoplite_mp.ml._feedback import Feedback
from hoplite_mp.ml.robust import GeometricMedian, Krum, Median, Score, TrimmedMean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_compressed", "begin_error_reset", "begin_robust"]

Array = np.ndarray[Any, np.dtype[Any]]
SIZE_MAX, STEPS_MAX = 7, 8
CALLS_EACH = 4  # approximate number of Group calls in one step
ITEMS_MAX = 20_000
PAUSES_S = 0.0, 0.002, 0.02
VALUES = 1000  # arrays contain integers below this, so float64 sums are exact
FAULTY = -50  # the faulty rank's array is multiplied by this
ROOT_LOST = "the root, rank 0, is lost"


# ---- members that are replaced


@dataclass(frozen=True)
class _Members:
    """The members of one Group. Some ranks leave; some are killed, and have a second incarnation
    in a new process."""

    work: Programs
    name: str
    salt: int
    size: int
    calls: int  # no step begins after this number of Group calls
    leaves: dict[int, int]  # rank -> the number of steps after which its first incarnation leaves

    def begin(self, member: Callable[[Any, int, int], None]) -> None:
        """Begins the programs; some ranks are killed and replaced. member: called with the Group,
        the rank, and 1 or 2 for its first or second incarnation."""
        work, rng = self.work, self.work.rng
        hosts, span_s = work.hosts(), self.calls / CALLS_EACH * PAUSES_S[-1]
        for rank in range(self.size):
            body = partial(self._live, member, rank, 1)
            work.program(rng.choice(hosts), f"rank {rank} of {self.name}", body)
        for rank in rng.sample(range(self.size), rng.choice([0, 1, 1, 2])):
            work.world.timeline.after(rng.random() * span_s, self._replace, member, rank)

    def _replace(self, member: Callable[[Any, int, int], None], rank: int) -> None:
        work, rng = self.work, self.work.rng
        hosts = work.hosts()
        if work.kill(f"rank {rank} of {self.name}") and hosts:
            late = rng.choice([0.0, 0.001, 0.05]) * rng.random()
            name, body = f"rank {rank} again of {self.name}", partial(self._live, member, rank, 2)
            work.world.timeline.after(late, work.program, rng.choice(hosts), name, body)

    def _live(
        self, member: Callable[[Any, int, int], None], rank: int, incarnation: int, c: Cluster
    ) -> None:
        try:
            g = c.group(self.name, self.size, rank)
        except (ValueError, PeerLostError):
            if incarnation == 1:
                raise
            return  # the first incarnation is still a member, or the Group has ended
        with g:
            member(g, rank, incarnation)

    def steps(self, g: Any, rank: int, incarnation: int) -> Iterator[int]:
        """Yields the numbers of a rank's steps. Between steps all ranks have made the same number
        of Group calls, so all stop after the same step."""
        import time

        rng = self.work.rng
        for step in itertools.count():
            leaves = incarnation == 1 and step == self.leaves.get(rank)
            if (g.calls or 0) >= self.calls or leaves:
                return
            time.sleep(rng.choice(PAUSES_S) * rng.random())
            self.work.world.calls_begun += 1
            yield step

    def key(self, g: Any) -> tuple[str, int]:
        """An identifier of the step that has just ended, the same on all ranks."""
        return f"{self.name} ({g._member.generation})", g.calls

    def refused(self, g: Any, error: Exception, words: tuple[str, ...]) -> None:
        """Checks an error raised by a call. It must contain one of these texts, and be the same on
        all ranks."""
        if not any(word in str(error) for word in words):
            raise error
        self.work.oracle.note_call(self.key(g), (str(error),))

    def lost(self, error: PeerLostError) -> bool:
        """Checks an error raised by a call. Returns whether the rank is still a member. The rank is
        a member only if the root of a reduce is lost. (A rank that has lost its slices raises no
        error, and begins the reduction again.)"""
        self.work.oracle.check_error(self.name, error)
        return ROOT_LOST in str(error)


def _members(work: Programs, kind: str, least: int) -> _Members:
    rng = work.rng
    work.groups += 1
    salt, size = work.salt(), rng.randint(least, SIZE_MAX)
    steps = rng.randint(2, STEPS_MAX)
    leaves = {one: rng.randrange(steps) for one in range(size) if rng.random() < 0.1}
    return _Members(work, f"{kind} {salt}", salt, size, CALLS_EACH * steps, leaves)


def _items(work: Programs, copies: int) -> int:
    return max(1, min(work.items(copies), ITEMS_MAX))


# ---- robust reductions


@dataclass
class _Inputs:
    """The arrays that the ranks of one Group have passed. A call uses the latest array of each
    rank.

    When the first rank has finished a call, every contributor is still in that call, or has died in
    it. A contributor that was replaced in the meantime has two arrays, of which the call has used
    one.
    """

    # rank -> incarnation -> its latest arrays: two after a call that has raised an error
    latest: dict[int, dict[int, list[Array]]] = field(default_factory=dict)
    of_calls: dict[Any, dict[int, dict[int, list[Array]]]] = field(default_factory=dict)

    def record(self, rank: int, incarnation: int, array: Array, *, after_error: bool) -> None:
        incarnations = self.latest.setdefault(rank, {})
        incarnations[incarnation] = [
            *(incarnations[incarnation][-1:] if after_error else []),
            array.copy(),
        ]

    def of(
        self, call: Any, contributors: tuple[int, ...], rank: int, incarnation: int
    ) -> Iterator[list[Array]]:
        """The possible arrays of the contributors. rank, incarnation: those of the caller."""
        given = self.of_calls.setdefault(
            (call, contributors), {one: dict(self.latest[one]) for one in contributors}
        )
        choices = [
            given[one][incarnation] if one == rank else [*itertools.chain(*given[one].values())]
            for one in contributors
        ]
        return map(list, itertools.product(*choices))


def _score(items: int) -> Score:
    return Score(np.arange(items, dtype=np.float64) % 7 + 1, lr=0.1)


# Operators, the minimum size of their Groups, and whether the result has the same bits as that of
# `reduced`. The bits of the other results depend on the number of slices.
OPERATORS: tuple[tuple[Callable[[int], Any], int, bool], ...] = (
    (lambda items: Median(), 2, True),
    (lambda items: TrimmedMean(1), 3, True),
    (lambda items: Krum(1, 2), 5, True),
    (lambda items: GeometricMedian(3), 2, False),
    (_score, 2, False),
    (lambda items: "mean", 2, True),  # with finite=True
    (lambda items: "max", 2, True),
)
REFUSALS = "inputs, not", "have finite distances", "is accepted", "have NaN or infinite values"


@dataclass(frozen=True)
class _Robust:
    """The reductions of one Group."""

    members: _Members
    items: int
    dtype: Any
    op: Any
    exact: bool
    finite: bool
    kind: str
    faulty: int  # a rank with wrong arrays, or -1
    not_a_number: bool  # whether these arrays have NaNs
    inputs: _Inputs = field(default_factory=_Inputs)

    def array(self, rank: int, incarnation: int, step: int) -> Array:
        """The array of a rank."""
        rng = np.random.default_rng([self.members.salt, rank, incarnation, step])
        values = rng.integers(1, VALUES, self.items)
        if isinstance(self.op, Score):
            values += (self.op.v * VALUES).astype(np.int64)
        array = values.astype(self.dtype)
        if rank == self.faulty:
            array *= FAULTY
            if self.not_a_number:
                array[: self.items // 2 + 1] = np.nan
        return array

    def live(self, g: Any, rank: int, incarnation: int) -> None:
        """The program of a member."""
        failed = False
        for step in self.members.steps(g, rank, incarnation):
            given = self.array(rank, incarnation, step)
            self.inputs.record(rank, incarnation, given, after_error=failed)
            failed = True
            try:
                value = getattr(g, self.kind)(given, op=self.op, finite=self.finite)
            except PeerLostError as error:
                if not self.members.lost(error):
                    return
            except (ReduceError, ValueError) as error:
                if self.members.work.oracle.is_undisturbed and not self.members.leaves:
                    raise
                self.members.refused(g, error, REFUSALS)
            else:
                failed = False
                given[...] = 1  # allowed, because no other rank reads it after the call
                self._check(g, rank, incarnation, value)

    def _check(self, g: Any, rank: int, incarnation: int, value: Any) -> None:
        call, ranks, oracle = self.members.key(g), g.contributors, self.members.work.oracle
        what = f"{self.op} {call} of {ranks}"
        rejects = isinstance(self.op, (Krum, Score)) or (self.finite and self.not_a_number)
        if rejects and self.faulty in ranks and self.items >= 100:
            raise WrongEnd(f"{what}: rank {self.faulty} is faulty")
        if isinstance(self.op, Krum) and len(ranks) != self.op.m:
            raise WrongEnd(what)
        off_root = self.kind == "reduce" and rank != 0
        if (value is None) != off_root:
            raise WrongEnd(f"{what}: rank {rank} has {value}")
        bits = () if self.kind == "reduce" else (value.tobytes(),)
        oracle.note_call(call, (*ranks, *bits))
        oracle.reads += 1
        possible = [
            reduced(self.op, rows) for rows in self.inputs.of(call, ranks, rank, incarnation)
        ]
        if not off_root and not any(self._is_equal(value, one) for one in possible):
            oracle.note_wrong(f"{what} is {value[:8]}, not {possible[0][:8]}")

    def _is_equal(self, value: Array, expected: Array) -> bool:
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return False
        if self.exact:
            return np.array_equal(value, expected, equal_nan=True)
        return np.allclose(value, expected, 1e-4, 1e-4, equal_nan=True)


def begin_robust(work: Programs) -> None:
    """Starts the members of a Group, which reduce repeatedly with one operator."""
    if not work.hosts():
        return
    rng = work.rng
    make, least, exact = rng.choice(OPERATORS)
    items = _items(work, 2 * SIZE_MAX)
    op = make(items)
    finite = isinstance(op, str) or rng.random() < 0.3
    members = _members(work, "robust", least + finite)  # finite=True leaves out the faulty rank
    robust = _Robust(
        members, items, rng.choice([np.float32, np.float64]), op, exact, finite,
        kind=rng.choice(["allreduce", "allreduce", "allreduce", "reduce"]),
        faulty=rng.choice([-1, rng.randrange(members.size)]),
        not_a_number=rng.random() < 0.5,
    )  # fmt: skip
    members.begin(robust.live)


# ---- compressed reductions, and SGD with error reset


COMPRESSORS = (
    TopK(0.3), Threshold(0.3, refresh=3), RandomBlocks(2, block=16), Quantise(8, block=32),
    Quantise(2, block=8), Float16(), PowerSGD(1),
)  # fmt: skip
EXACT = TopK, Threshold, RandomBlocks  # their codes have unchanged values, so sums are exact
ROUNDED = 0.25  # largest rounding error of sums of values below VALUES
NAME = "w"  # the name of the arrays
CALLS = 2  # number of Group calls in an undisturbed reduction
LR = 0.5


@dataclass
class _Ledger:
    """Checks that no values are lost. A rank's balance in a call is the sum of the values that it
    has passed and no longer keeps; the first rank subtracts the result. The balances of all
    contributors to a call add up to 0, and all have the same result, bit for bit. If the call was
    repeated, owners of slices may have dropped their residuals.
    """

    limit: float  # maximum magnitude of a sum of balances
    # (call, contributors) -> rank -> (balance, residual that an owner may have dropped, bits)
    entries: dict[Any, dict[int, tuple[Array, Array, bytes]]] = field(default_factory=dict)

    def enter(
        self, call: Any, ranks: tuple[int, ...], rank: int, entry: tuple[Array, Array, bytes]
    ) -> None:
        """Called by each contributor. The last one checks the sum, which is not checked if a
        contributor has died."""
        found = self.entries.setdefault((call, ranks), {})
        for other, (_, _, bits) in found.items():
            if bits != entry[2]:
                raise WrongBytes(f"{call} of {ranks}: ranks {other} and {rank} have other bits")
        found[rank] = entry
        if len(found) == len(ranks):
            left: Array = sum(one[0] for one in found.values())  # type: ignore[assignment]
            owned: Array = sum(one[1] for one in found.values())  # type: ignore[assignment]
            lost = min(float(np.abs(one).max()) for one in (left, left - owned))
            if lost > self.limit:
                raise WrongBytes(f"{call} of {ranks} has lost {lost}")


@dataclass(frozen=True)
class _Compressed:
    """The compressed reductions of one Group."""

    members: _Members
    shape: tuple[int, int]
    compressor: Any
    op: str
    not_finite: tuple[int, int]  # (rank, step): this array has a NaN, which all ranks refuse
    ledger: _Ledger

    def array(self, rank: int, incarnation: int, step: int) -> Array:
        """The array of a rank."""
        rng = np.random.default_rng([self.members.salt, rank, incarnation, step])
        array = rng.integers(-VALUES, VALUES, self.shape).astype(np.float32)
        if incarnation == 1 and (rank, step) == self.not_finite:
            array[0, 0] = np.nan
        return array

    def live(self, g: Any, rank: int, incarnation: int) -> None:
        """The program of a member."""
        feedback = Feedback(g, self.compressor)
        for step in self.members.steps(g, rank, incarnation):
            given, kept = self.array(rank, incarnation, step), self._kept(feedback)
            members, owned, calls = feedback.contributors, self._owned(feedback, rank), g.calls
            error: Exception | None = None
            try:
                total = feedback.allreduce(NAME, given, self.op).reshape(-1).astype(np.float64)
            except (PeerLostError, ValueError) as raised:
                error = raised
            if error is not None:
                if not np.array_equal(self._kept(feedback), kept):
                    raise WrongBytes(f"{self.members.name}: an error has changed the residual")
                if not isinstance(error, PeerLostError):
                    self.members.refused(g, error, ("has values that are not finite",))
                elif not self.members.lost(error):
                    return
                continue
            ranks = feedback.contributors
            sent = given.reshape(-1) + kept - self._kept(feedback)
            if self.op == "mean":
                sent /= len(ranks)
            owned *= members == ranks
            balance = sent + owned - self._owned(feedback, rank) - total * (rank == ranks[0])
            call, bits = self.members.key(g), total.tobytes()
            again = g.calls - (calls or 0) > CALLS  # repeated, perhaps with other members
            self.ledger.enter(call, ranks, rank, (balance, owned * again, bits))
            self.members.work.oracle.note_call(call, (*ranks, bits))
            self.members.work.oracle.reads += 1

    def _kept(self, feedback: Feedback) -> Array:
        """The rank's residual."""
        found = feedback.residual(NAME)
        size = self.shape[0] * self.shape[1]
        return np.zeros(size) if found is None else found.astype(np.float64)

    def _owned(self, feedback: Feedback, rank: int) -> Array:
        """The residual of the slice that the rank owns, in an array of the whole size."""
        found = np.zeros(self.shape[0] * self.shape[1])
        stream = feedback._streams.get(NAME)
        if stream is not None and stream.owned is not None:
            ranks = feedback.contributors
            np.array_split(found, len(ranks))[ranks.index(rank)][...] = stream.owned
        return found

    def train(self, g: Any, rank: int, incarnation: int) -> None:
        """The program of a member that trains with CSER, without momentum."""
        w = np.full(self.shape, self.members.salt, np.float32)
        sgd = CSER([w], g, LR, 0.0, update_ratio=2, reset_ratio=2, reset_every=2, block=16)
        for step in self.members.steps(g, rank, incarnation):
            grad, before = self.array(rank, 2, step), w.astype(np.float64)
            try:
                sgd.step([grad])
            except PeerLostError as error:
                if not self.members.lost(error):
                    return
                continue
            call, ranks, bits = self.members.key(g), sgd.contributors, sgd.y.tobytes()
            balance = w - before + LR * grad
            self.ledger.enter(call, ranks, rank, (balance, np.zeros(1), bits))
            self.members.work.oracle.note_call(call, (*ranks, bits))
            self.members.work.oracle.reads += 1


def _compressed(work: Programs, kind: str, compressor: Any) -> _Compressed:
    rng = work.rng
    members = _members(work, kind, 2)
    shape = 4, -(-_items(work, 4 * members.size) // 4)
    op = rng.choice(["sum", "mean"])
    not_finite = rng.randrange(2 * members.size), rng.randrange(STEPS_MAX)
    exact = isinstance(compressor, EXACT) and op == "sum"
    return _Compressed(
        members, shape, compressor, op, not_finite, _Ledger(0.0 if exact else ROUNDED)
    )


def begin_compressed(work: Programs) -> None:
    """Starts the members of a Group, which reduce compressed arrays with error feedback."""
    if work.hosts():
        compressed = _compressed(work, "compressed", work.rng.choice(COMPRESSORS))
        compressed.members.begin(compressed.live)


def begin_error_reset(work: Programs) -> None:
    """Starts the members of a Group, which train with CSER."""
    if work.hosts():
        compressed = _compressed(work, "error reset", None)
        compressed.members.begin(compressed.train)
