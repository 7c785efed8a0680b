"""Proactive data-parallel updates: the model is updated while partial sums are being computed.

Each rank visits the blocks of its rows in turn, and keeps the latest partial sums of each block. A
collection adds up the sums that the ranks have at that time, and every rank updates its copy of the
state from the totals. Ranks continue to compute during a collection. The totals are the same on all
ranks, so the states are equal, bit for bit, and all ranks make the same decisions about the next
period and about when to stop.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hoplite_mp._api.cluster import current
from hoplite_mp._client.completions import as_completed
from hoplite_mp.errors import ClosedError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hoplite_mp import Group

__all__ = ["ProactiveResult", "proactive"]

Array = np.ndarray[Any, np.dtype[Any]]
Sums = Any  # an array, or a tuple of arrays

STATE_TAG = 1
WINDOW = 4  # number of collections over which progress is measured
BETTER = 1.05  # a period replaces another if its progress is faster by this factor
SETTLED = 64  # number of collections before other periods are tried again
LEVELS = 20  # periods are at most 2 ** LEVELS blocks
FIRST_LEVEL_MAX = 4  # largest level of the first period, which depends on a collection's duration
EPSILON = 1e-9  # in passes: a sum of shares may miss the end of a pass by a rounding error
LAST_S = 1.0  # seconds to wait for the other ranks after the first rank has returned


@dataclasses.dataclass(frozen=True)
class ProactiveResult:
    """The result of `proactive`.

    state: the last state. loss: the mean loss of the rows, each as computed at its last visit.
    rows: the number of rows visited. passes: the corresponding number of passes over all rows.
    rounds: the number of updates. period: the last period in seconds; 0.0 means an update after
    each block, None an update after each pass. converged: whether `tol` was reached. history: for
    each update, the seconds since the start, the loss, and the state if `states=True` was given,
    otherwise None."""

    state: Any
    loss: float
    rows: int
    passes: float
    rounds: int
    period: float | None
    converged: bool
    history: tuple[tuple[float, float, Any], ...]


@dataclasses.dataclass(frozen=True)
class _Job:
    """The arguments of `proactive`."""

    partial: Callable[[Any, Any], tuple[float, Sums]]
    update: Callable[[Any, Sums, int], Any]
    state: Any
    period: float | Literal["auto"] | None
    block: int
    tol: float
    passes: float
    states: bool


def proactive(
    partial: Callable[[Any, Any], tuple[float, Sums]],
    shards: Sequence[Any],
    update: Callable[[Any, Sums, int], Any],
    state: Any,
    period: float | Literal["auto"] | None = "auto",
    *,
    block: int = 1024,
    tol: float = 1e-4,
    passes: float = 100,
    states: bool = False,
) -> ProactiveResult:
    """Minimises a sum over rows, with updates that do not wait for passes over all rows.

    There is one rank for each shard, in a task on the current Cluster. If no Cluster is open, this
    process visits all shards, with an update after each block or, with `period=None`, after each
    pass. When a block is visited again, its new sums replace the old ones. So the totals cover all
    rows visited so far, each at a recent state (incremental EM).

    Parameters
    ----------
    partial : callable
        ``partial(state, rows) -> (loss, sums)``. `rows` is a block of a shard. `loss` is the loss,
        summed over the rows. `sums` is an array or a tuple of arrays of real numbers, also summed
        over the rows, with the same shapes for every block.
    shards : sequence
        The rows of each rank: an array, a tuple of arrays of equal length, or a ref to one of
        these. Rows are along the first axis.
    update : callable
        ``update(state, sums, rows) -> state`` computes the next state from the totals (float64)
        and their number of rows. It must depend only on its arguments, because every rank calls
        it.
    state : object
        The first state. It is pickled, and is not changed in place.
    period : float, "auto" or None
        Seconds from one collection to the next. "auto" tries periods, and keeps the one with the
        most progress per second. None: a collection after each pass over all rows
        (bulk-synchronous). With any other period, the result depends on timing.
    block : int
        The number of rows in a block. The sums of each block are kept.
    tol : float
        Stops when a pass lowers the mean loss per row by less than this.
    passes : float
        Stops after this number of passes over all rows.
    states : bool
        Whether `history` contains the states.

    Returns
    -------
    ProactiveResult
        The last state, and how it was reached.

    Raises
    ------
    ValueError
        There are no shards, a shard has no rows, or an argument is out of range.

    Notes
    -----
    A rank that dies is replaced. The replacement receives the state from another rank. The rank's
    rows are missing from the totals until the replacement has visited them again; `proactive` does
    not return before that.

    Source: Zhao, Zhou, Gao: A Proactive Data-Parallel Framework for Machine Learning (BDCAT 2021),
    asynchronous variant. In the paper a parameter server collects the sums; here the ranks do,
    with allreduce. Replaced sums: Neal, Hinton: A view of the EM algorithm that justifies
    incremental variants (1998).

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> def partial(mean, rows):
    ...     return ((rows - mean) ** 2).sum(), rows.sum(axis=0)
    >>> shards = [np.arange(4.0), np.arange(4.0, 10.0)]
    >>> print(ml.proactive(partial, shards, lambda mean, sums, n: sums / n, 0.0).state)
    4.5
    """
    if not len(shards):
        raise ValueError("proactive needs at least one shard")
    seconds = period if isinstance(period, (int, float, np.number)) else -1
    if period is not None and period != "auto" and not 0 <= seconds < math.inf:
        raise ValueError(f'period must be "auto", None or a number of seconds, not {period!r}')
    if int(block) < 1:
        raise ValueError(f"block must be at least 1 row, not {block}")
    if not passes > 0:
        raise ValueError(f"passes must be above 0, not {passes}")
    job = _Job(partial, update, state, period, int(block), float(tol), float(passes), states)
    try:
        cluster = current()
    except ClosedError:
        return _inline(job, shards)
    return _on_cluster(cluster, job, shards)


class _Rows:
    """A rank's rows, in blocks, and the latest sums of each block."""

    def __init__(self, job: _Job, shards: Sequence[Any]) -> None:
        self._job = job
        self._blocks = [one for shard in shards for one in _blocks(shard, job.block)]
        self._shapes: list[tuple[int, ...]] | None = None  # None: no block was visited yet
        self._single = True  # whether `partial` returns an array, not a tuple
        self._latest: Array | None = None  # for each block: its sums, its loss, its number of rows
        self._total = np.zeros(0)
        self._next = 0
        self.count = sum(rows for rows, _ in self._blocks)
        self.processed = 0  # rows since the last collection
        self.current = 0  # blocks visited since the last change of the state

    def visit(self, state: Any) -> None:
        """Replaces the sums of the next block."""
        rows, values = self._blocks[self._next]
        loss, sums = self._job.partial(state, values)
        self._single = not isinstance(sums, tuple)
        arrays = [np.asarray(one) for one in ((sums,) if self._single else sums)]
        flat = np.concatenate([*(one.ravel() for one in arrays), [loss, rows]], dtype=np.float64)
        if self._latest is None:
            self._shapes = [one.shape for one in arrays]
            self._latest = np.zeros((len(self._blocks), flat.size))
            self._total = np.zeros(flat.size)
        elif [one.shape for one in arrays] != self._shapes:
            raise ValueError(
                f"partial returned sums of shapes {[one.shape for one in arrays]} after "
                f"{self._shapes}: all blocks must have the same"
            )
        self._total += flat - self._latest[self._next]
        self._latest[self._next] = flat
        self.processed += rows
        self.current += 1
        self._next = (self._next + 1) % len(self._blocks)
        if self._next == 0:  # removes the accumulated rounding errors of the differences
            self._total = self._latest.sum(axis=0)

    def total(self) -> Array:
        """The sums, the loss and the number of rows of all blocks visited so far."""
        return self._total

    def shape_like(self, state: Any) -> int:
        """The length of `total`. If no block was visited yet, visits one to find out."""
        if self._latest is None:
            self.visit(state)
            self._clear()
        return self._total.size

    def _clear(self) -> None:
        assert self._latest is not None
        self._latest[:] = 0.0
        self._total = np.zeros_like(self._total)
        self._next = self.processed = self.current = 0

    @property
    def exhausted(self) -> bool:
        """Whether all blocks were visited at this state, so that another visit would change
        nothing."""
        return self.current >= len(self._blocks)

    def unflatten(self, flat: Array) -> Sums:
        """The sums in the form in which `partial` returns them."""
        assert self._shapes is not None
        ends = list(itertools.accumulate(math.prod(shape) for shape in self._shapes))
        parts = np.split(flat[: ends[-1]], ends[:-1])
        arrays = tuple(part.reshape(s) for part, s in zip(parts, self._shapes, strict=True))
        return arrays[0] if self._single else arrays


def _blocks(shard: Any, block: int) -> Iterator[tuple[int, Any]]:
    """Yields the number of rows and the values of each block. A block has rows from the whole
    shard, so that the first update is not based on a single class if the rows are sorted."""
    several = isinstance(shard, tuple)
    arrays = [np.asarray(one) for one in (shard if several else (shard,))]
    lengths = {one.shape[0] if one.ndim else 0 for one in arrays}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "the arrays of a shard must have the same number of rows, at least one, not "
            f"{sorted(lengths)}"
        )
    count = -(-lengths.pop() // block)
    for begin in range(count):
        parts = tuple(one[begin::count] for one in arrays)
        yield len(parts[0]), parts if several else parts[0]


class _Control:
    """Decides how long to accumulate and when to stop. The decisions are the same on all ranks."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.rounds = 0
        self.rows = 0
        self.passes = 0.0
        self.seconds = 0.0
        self.loss = math.inf
        self.done = self.converged = False
        self.history: list[tuple[float, float, Any]] = []
        self._checked = (0.0, math.inf)  # passes and loss at the last check for convergence
        self._search = _Search() if job.period == "auto" else None

    @property
    def period(self) -> float | None:
        """Seconds until the next collection begins. None: it begins at the end of a pass."""
        return self._search.period if self._search is not None else self._job.period  # type: ignore[return-value]

    def advance(
        self, loss: float, counted: float, present: float, processed: float, complete: bool = True
    ) -> None:
        """Records an update. loss, counted: the loss and the number of the rows in the totals.
        present: the number of rows of the ranks that took part. processed: rows visited since the
        last update. complete: whether all ranks took part. While a rank is missing, passes do not
        count, and the fit does not stop."""
        self.rounds += 1
        self.loss = loss / counted
        self.rows += round(processed)
        if not complete:
            self._checked = (self.passes, math.inf)
            return
        self.passes += processed / present
        last_passes, last_loss = self._checked
        if counted < present:
            return
        if self.passes >= last_passes + 1 - EPSILON:
            self.converged = last_loss - self.loss < self._job.tol
            self._checked = (self.passes, self.loss)
        self.done = self.converged or self.passes >= self._job.passes - EPSILON

    def pace(self, whole: bool, elapsed: float, collecting: float, block: float) -> None:
        """Records how many seconds the round, its collection and a block have taken, as means over
        the ranks. whole: whether all rows are in the totals."""
        self.seconds += elapsed
        if self._search is not None:
            self._search.advance(self.loss if whole else math.inf, elapsed, collecting, block)

    def note(self, state: Any) -> None:
        kept = state if self._job.states else None
        self.history.append((float(self.seconds), float(self.loss), kept))

    def result(self, state: Any, period: float | None) -> ProactiveResult:
        period = None if period is None else float(period)
        loss, passes, converged = float(self.loss), float(self.passes), bool(self.converged)
        return ProactiveResult(
            state, loss, self.rows, passes, self.rounds, period, converged, tuple(self.history)
        )


class _Search:
    """Finds the period with the most progress per second, among multiples 2 ** level of a block.

    Progress slows down during a fit, so the candidate's window (`WINDOW` collections) is compared
    with the mean of the windows before and after it."""

    def __init__(self) -> None:
        self.level = -1  # level of the best period known
        self._trial: int | None = None  # the level that is compared with the best level
        self._step = 1
        self._failed = 0  # directions in which no better level was found
        self._block = 0.0
        self._windows: list[float] = []
        self._left = WINDOW
        self._begin = (math.inf, 0.0)  # loss and time at the beginning of the window
        self._at = 0.0

    @property
    def period(self) -> float:
        level = self.level if self._trial is None else self._trial
        return self._block * 2.0 ** max(level, 0)

    def advance(self, loss: float, elapsed: float, collecting: float, block: float) -> None:
        """Records a collection. loss: infinite until all rows are in the totals."""
        self._at += elapsed
        if self.level < 0:
            self._block = block
            ratio = max(collecting, block) / max(block, 1e-9)
            self.level = min(FIRST_LEVEL_MAX, round(math.log2(ratio)))
        if math.isinf(loss) or math.isinf(self._begin[0]):
            self._begin = (loss, self._at)
            return
        self._left -= 1
        if self._left > 0:
            return
        self._windows.append((self._begin[0] - loss) / max(self._at - self._begin[1], 1e-9))
        self._begin, self._left = (loss, self._at), WINDOW
        self._decide()

    def _decide(self) -> None:
        if self._trial is not None:  # this was the candidate's window
            self._trial = None
            return
        if len(self._windows) >= 3:
            before, candidate, after = self._windows[-3:]
            if candidate > BETTER * (before + after) / 2:
                self.level, self._failed = self.level + self._step, 0
                # The windows so far were not measured at the new level.
                self._windows = []
                return
            self._step, self._failed = -self._step, self._failed + 1
            self._windows = self._windows[-1:]
            if self._failed >= 2:
                self._left, self._failed, self._windows = SETTLED, 0, []
                return
        level = self.level + self._step
        if 0 <= level <= LEVELS:
            self._trial = level
        else:
            self._step, self._windows = -self._step, []


def _inline(job: _Job, shards: Sequence[Any]) -> ProactiveResult:
    """Runs all ranks in this process, without collections."""
    rows, control, state = _Rows(job, shards), _Control(job), job.state
    while not control.done:
        begun = time.perf_counter()
        rows.visit(state)
        while job.period is None and rows.processed < rows.count:
            rows.visit(state)
        loss, counted = rows.total()[-2:]
        state = job.update(state, rows.unflatten(rows.total()), round(counted))
        control.advance(loss, counted, rows.count, rows.processed)
        control.seconds += time.perf_counter() - begun
        control.note(state)
        rows.processed = 0
    return control.result(state, None if job.period is None else 0.0)


def _on_cluster(cluster: Any, job: _Job, shards: Sequence[Any]) -> ProactiveResult:
    """Runs one task for each rank. All ranks that finish return the same result."""
    name, size = f"proactive-{uuid.uuid4().hex}", len(shards)
    held = cluster.put(job)
    members = [
        cluster.submit(_member, name, size, rank, held, shard) for rank, shard in enumerate(shards)
    ]
    try:
        # A rank that is replaced after the other ranks have returned would wait for them in vain.
        first = next(iter(as_completed(members)))
        found: ProactiveResult = first.result()
        cluster.wait(members, timeout=LAST_S)
        return found
    finally:
        for member in members:
            member.cancel(force=True)


def _member(name: str, size: int, rank: int, job: _Job, shard: Any) -> ProactiveResult:
    """Runs a rank, in a task."""
    with current().group(name, size, rank) as group:
        return _Member(group, job, shard).run()


class _Member:
    """One rank: accumulates, collects, and updates its copy of the state."""

    def __init__(self, group: Group, job: _Job, shard: Any) -> None:
        self._group, self._job = group, job
        self._rows = _Rows(job, [shard])
        self._control, self._state = _Control(job), job.state
        self._width = self._rows.shape_like(job.state)
        self._collecting_s = self._block_s = 0.0
        self._collected = time.monotonic()

    def run(self) -> ProactiveResult:
        self._collect(overlap=False)  # a replacement gets the state before it computes
        self._collecting_s = 0.0  # without the first collection, which waited for other ranks
        while not self._control.done:
            self._accumulate(self._control.period)
            self._collect(overlap=self._job.period is not None)
        return self._control.result(self._state, self._control.period)

    def _accumulate(self, period: float | None) -> None:
        """Visits blocks for `period` seconds, or until all are visited; at least one block."""
        begun, visited = time.monotonic(), 0
        while True:
            self._rows.visit(self._state)
            visited += 1
            passed = time.monotonic() - begun
            if self._rows.exhausted or (period is not None and passed >= period):
                break
        self._block_s = passed / visited

    def _collect(self, *, overlap: bool) -> None:
        """Makes one allreduce of the totals, and then the update. overlap: whether to visit blocks
        during the allreduce."""
        begun = time.monotonic()
        processed, self._rows.processed = self._rows.processed, 0
        rounds = np.zeros(self._group.size)
        rounds[self._group.rank] = self._control.rounds + 1
        elapsed = begun - self._collected
        about = [self._rows.count, processed, elapsed, self._collecting_s, self._block_s]
        given = np.concatenate([self._rows.total(), about, rounds])
        if overlap:
            future = self._group.allreduce_async(given)
            while not (future.done() or self._rows.exhausted):
                self._rows.visit(self._state)
            total = future.result()
        else:
            total = self._group.allreduce(given)
        self._collected = time.monotonic()
        self._collecting_s = self._collected - begun
        self._apply(total[: self._width], total[self._width :])
        self._rows.current = 0

    def _apply(self, sums: Array, about: Array) -> None:
        """Makes the update. Ranks that have missed updates get the state from the lowest rank that
        has missed none."""
        present, processed, elapsed, collecting, block = about[:5]
        rounds, ranks = about[5:], self._group.contributors
        newest = rounds.max()
        behind = [rank for rank in ranks if rounds[rank] < newest]
        leader = next(rank for rank in ranks if rounds[rank] == newest)
        if self._group.rank in behind:
            self._receive(leader)
            return
        loss, counted = sums[-2:]
        if counted > 0:
            self._state = self._job.update(self._state, self._rows.unflatten(sums), round(counted))
            complete = len(ranks) == self._group.size
            self._control.advance(loss, counted, present, processed, complete)
            seconds = np.array([elapsed + collecting, collecting, block]) / len(ranks)
            self._control.pace(complete and counted >= present, *seconds)
            self._control.note(self._state)
        if self._group.rank == leader:
            for rank in behind:
                self._send(rank)

    def _send(self, rank: int) -> None:
        try:
            self._group.send((self._state, self._control), rank, STATE_TAG)
        except PeerLostError:  # the rank has died again
            return

    def _receive(self, leader: int) -> None:
        """Receives the state. If the leader dies, the next collection has another leader."""
        try:
            self._state, self._control = self._group.recv(leader, STATE_TAG)
        except PeerLostError:
            return
