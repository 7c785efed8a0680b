"""The steps of one worker, read from the file of `Cluster.trace`.

A step is a sequence of calls that repeats. In synchronous training these are Group calls, in
asynchronous training calls to an actor that has the parameters. The worker computes between the
calls.

    synchronous    compute ─ allreduce ─ compute ─ allreduce ─ ...     calls of one member
    asynchronous   pull ─ compute ─ push ─ pull ─ compute ─ push ...   tasks of one actor

The trace has a single worker, so the time between two calls is the worker's computation.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

__all__ = [
    "GROUP_KINDS",
    "STEPS_MIN",
    "NotRecorded",
    "RecordedCall",
    "RecordedTraining",
    "read",
    "recorded",
]

# Group calls that can be replayed with any number of ranks, because each rank passes one array.
GROUP_KINDS = (
    "allreduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "allgather",
    "gather",
    "barrier",
)
# The minimum number of complete steps after the first one. With fewer, percentiles are meaningless.
STEPS_MIN = 5
# The minimum share of calls that repeat. The other calls start or end the training.
REPEATED_SHARE_MIN = 0.5
# Longer steps are found only if their length is given. Higher: traces without steps take longer.
CALLS_PER_STEP_MAX = 1000
ACTOR_TRACK = "actor "


class NotRecorded(ValueError):
    """The file is not a trace of a worker with recognisable steps."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a step. compute_s: seconds since the worker's previous call; service_s: seconds
    that the call itself took, for the actor's method or for copies within the single host."""

    kind: str
    compute_s: float
    service_s: float
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class RecordedTraining:
    """The steps of one worker. `name`: the actor's name in asynchronous training, otherwise ""."""

    name: str
    steps: tuple[tuple[RecordedCall, ...], ...]

    @property
    def is_asynchronous(self) -> bool:
        return bool(self.name)

    @property
    def step_s(self) -> float:
        """The median duration of the steps in seconds, with one worker on one host."""
        return statistics.median(
            sum(call.compute_s + call.service_s for call in step) for step in self.steps
        )

    @property
    def bytes_of_step(self) -> int:
        """The largest sum of the bytes of one step's calls."""
        return max(sum(call.bytes_in + call.bytes_out for call in step) for step in self.steps)


_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Microseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Args(msgspec.Struct):
    name: str = ""
    pid: int = 0
    rank: int = 0
    outcome: str = ""
    bytes_in: _Bytes = 0
    bytes_out: _Bytes = 0


class _Event(msgspec.Struct):
    """An event of the file."""

    ph: str
    name: str
    pid: int = 0
    tid: int = 0
    cat: str = ""
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


class _Other(msgspec.Struct):
    dropped: dict[str, int]


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    otherData: _Other


def read(path: Path, server: str = "", calls_per_step: int = 0) -> RecordedTraining:
    """Reads the steps of a trace from its file. Has the parameters and errors of `recorded`, and
    raises OSError if the file cannot be read."""
    return recorded(path.read_bytes(), server, calls_per_step)


def recorded(data: bytes, server: str = "", calls_per_step: int = 0) -> RecordedTraining:
    """Finds the steps in a trace.

    Parameters
    ----------
    data : bytes
        The contents of a file written by `Cluster.trace`.
    server : str
        The name or class of the actor with the parameters. "": the trace has Group calls, or calls
        to one actor.
    calls_per_step : int
        0: the shortest sequence of calls that repeats is one step.

    Raises
    ------
    NotRecorded
        The data is not a trace, has no steps, or has steps of several workers.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotRecorded(f"the file is not a trace of hoplite_mp: {error}") from None
    if any(file.otherData.dropped.values()):
        raise NotRecorded("events of the trace were dropped: trace fewer steps")
    events = sorted((one for one in file.traceEvents if one.ph == "X"), key=lambda one: one.ts)
    calls = [one for one in events if one.cat == "group call"]
    if calls and not server:
        _check_member(calls)
        return RecordedTraining("", _steps(_calls(calls, of_group=True), calls_per_step))
    tracks = {one.tid: one.args.name for one in file.traceEvents if one.name == "thread_name"}
    return _of_actor(_calls_of_actors(events, tracks, server), calls_per_step)


def _check_member(calls: list[_Event]) -> None:
    members = {(one.pid, one.args.pid, one.args.rank) for one in calls}
    if len(members) > 1 or any(rank for _, _, rank in members):
        raise NotRecorded(
            f"the trace has calls of {len(members)} members of Groups, of ranks up to "
            f"{max(rank for _, _, rank in members)}: trace a single worker, in Groups of size 1"
        )
    for one in calls:
        kind = one.name.split(" ")[0]
        if kind not in GROUP_KINDS:
            raise NotRecorded(f"{kind} cannot be played, only {', '.join(GROUP_KINDS)}")


def _calls_of_actors(
    events: list[_Event], tracks: dict[int, str], server: str
) -> dict[str, list[_Event]]:
    """The calls to each actor, by the actor's name. With `server`, only calls to that actor."""
    actors: dict[str, list[_Event]] = {}
    for one in events:
        track = tracks.get(one.tid, "")
        if one.cat == "task" and track.startswith(ACTOR_TRACK):
            actors.setdefault(track.removeprefix(ACTOR_TRACK), []).append(one)
    if server:
        ends = (f"{server} (", f"{server}, ")
        actors = {name: calls for name, calls in actors.items() if name.startswith(ends)}
    if not actors:
        what = f"no calls of the actor {server!r}" if server else "no calls of a Group or an actor"
        raise NotRecorded(f"the trace has {what}")
    return actors


def _of_actor(actors: dict[str, list[_Event]], calls_per_step: int) -> RecordedTraining:
    """The steps of the only actor whose calls repeat."""
    found: list[RecordedTraining] = []
    errors: list[NotRecorded] = []
    for name, calls in actors.items():
        try:
            steps = _steps(_calls(calls, of_group=False), calls_per_step)
            found.append(RecordedTraining(name, _with_sizes(steps)))
        except NotRecorded as error:
            errors.append(error)
    if not found:
        raise errors[0]
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise NotRecorded(f"calls of the actors {names} repeat: choose one as the server")
    return found[0]


def _with_sizes(
    steps: tuple[tuple[RecordedCall, ...], ...],
) -> tuple[tuple[RecordedCall, ...], ...]:
    """Replaces missing sizes of results by the median. A size is missing if the caller had released
    the result before the task was recorded."""
    usual = [
        int(statistics.median(call.bytes_out for call in calls))
        for calls in zip(*steps, strict=True)
    ]
    return tuple(
        tuple(
            replace(call, bytes_out=call.bytes_out or nbytes)
            for call, nbytes in zip(step, usual, strict=True)
        )
        for step in steps
    )


def _calls(events: list[_Event], *, of_group: bool) -> list[RecordedCall]:
    found = []
    before = 0.0  # the end of the previous call
    for one in events:
        if one.args.outcome != "done":
            continue
        kind = one.name.split(" ")[0] if of_group else one.name
        compute_s, service_s = max(0.0, one.ts - before) / 1e6, one.dur / 1e6
        about = one.args.bytes_in, one.args.bytes_out
        found.append(RecordedCall(kind, compute_s, service_s, *about))
        before = max(before, one.ts + one.dur)
    return found


# ---- steps


def _steps(calls: list[RecordedCall], length: int) -> tuple[tuple[RecordedCall, ...], ...]:
    """Cuts the calls into steps. The first step is left out, because it includes preparations, and
    fills caches."""
    sized: list[Hashable] = [(call.kind, call.bytes_in) for call in calls]
    named: list[Hashable] = [call.kind for call in calls]
    # The second attempt ignores sizes, which vary if values are compressed or pickled.
    for signatures in (sized, named):
        begin, end, period = _repeated(signatures, length)
        count = (end - begin) // period if period else 0
        if count > STEPS_MIN:
            return tuple(
                tuple(calls[begin + k * period : begin + (k + 1) * period]) for k in range(1, count)
            )
    raise NotRecorded(
        f"{len(calls)} calls do not repeat in more than {STEPS_MIN} steps"
        + f" of {length} calls" * bool(length)
    )


def _repeated(signatures: Sequence[Hashable], length: int) -> tuple[int, int, int]:
    """(begin, end, period) of the calls that repeat, with the shortest period that fits; zeros if
    there are none. length: the period, or 0 if it is not known."""
    known: dict[Hashable, int] = {}
    ids = np.array([known.setdefault(one, len(known)) for one in signatures], np.int64)
    most = min(CALLS_PER_STEP_MAX, len(ids) // (STEPS_MIN + 1))
    for period in [length] if length else range(1, most + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        edges = np.concatenate([[-1], differs, [max(0, len(ids) - period)]])
        runs = np.diff(edges) - 1
        at = int(runs.argmax())
        covered = int(runs[at]) + period
        if covered >= REPEATED_SHARE_MIN * len(ids) and covered > STEPS_MIN * period:
            begin = int(edges[at]) + 1
            return begin, begin + covered, period
    return 0, 0, 0
