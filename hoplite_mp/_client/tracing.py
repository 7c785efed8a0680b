"""The user's side of a trace: a `with` block that writes a file.

The nodes record events. This module starts and stops the recording, reads the records, and writes
the timeline. A wrong path raises an error before the recording starts. The file appears only when
it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import logging
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import msgspec

from hoplite_mp._common import clock
from hoplite_mp._common.ids import pack_id
from hoplite_mp._protocol.diagnostics import (
    EVENT,
    KINDS_OF_EVENTS,
    OUTCOMES_OF_EVENTS,
    TraceDocument,
)
from hoplite_mp._protocol.local import TraceBegin, TraceDrop, TraceEnd, TracePiece
from hoplite_mp._version import __version__
from hoplite_mp.errors import HopliteError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._client.runtime import Runtime

__all__ = ["Clock", "Trace", "TraceText", "ahead_ns"]


TRACE_BITS = 63  # length of the random number that identifies a trace
_log = logging.getLogger("hoplite_mp")


class Trace:
    """One trace, which can be entered once."""

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str]) -> None:
        """Checks `path` by creating a file next to it. Raises OSError if no file can be created
        there."""
        runtime.memory.check()
        self._runtime = runtime
        self.path = Path(os.path.abspath(path))
        self._trace = 0
        self.cluster: Any = None  # kept alive by this object
        self._begin_ns = 0
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path))
        try:
            with self._beside() as (_, made):
                made.unlink()
        except OSError as error:  # report the file that the user has named
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    @contextlib.contextmanager
    def _beside(self) -> Iterator[tuple[TextIO, Path]]:
        """A context manager for a new file in the same directory. The file is deleted at the end
        unless it was renamed."""
        begin = os.fsdecode(os.fsencode(self.path.name)[:100])  # the limit for names is in bytes
        made = self.path.with_name(f".{begin}.{os.urandom(4).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(made, flags, 0o666), "w", encoding="utf-8") as file:
            try:
                yield file, made
            finally:
                made.unlink(missing_ok=True)

    def __enter__(self) -> Trace:
        if self._trace:
            raise RuntimeError("this trace has been entered before: create another one")
        self._trace = int(os.urandom(8).hex(), 16) >> (64 - TRACE_BITS) | 1
        self._begin_ns = clock.monotonic_ns()
        try:
            refusal = self._runtime.channel.call(TraceBegin(self._trace)).value
        except BaseException:  # for example Ctrl-C: the trace may have begun
            self._drop()
            raise
        if refusal:
            raise RuntimeError(refusal)
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        try:
            self._finish()
        except Exception as error:
            if kind is None or not isinstance(error, (OSError, HopliteError)):
                raise
            # The exception raised in the `with` block takes precedence.
            _log.error("%s could not be written: %s", self.path, error)
        finally:
            self._drop()

    def _drop(self) -> None:
        """Makes the nodes discard the trace."""
        with contextlib.suppress(HopliteError):
            self._runtime.channel.call(TraceDrop(self._trace))

    def _finish(self) -> None:
        self._runtime.memory.check()
        found = self._runtime.channel.call(TraceEnd(self._trace)).value
        end_ns = clock.monotonic_ns()
        if found is None:
            raise RuntimeError("this trace has already ended: nothing is left to write")
        nodes, lost, left = found
        text = TraceText(self._begin_ns, end_ns)
        with self._beside() as (file, made):
            file.write(text.head())
            for node, nbytes, clocks in nodes:
                data = self._read(node, nbytes)
                if data is None:
                    lost.append(node)
                    continue
                file.writelines(text.node(node, data, [tuple(clock) for clock in clocks]))
            file.write(text.tail(sorted(lost), left, __version__))
            file.flush()
            os.replace(made, self.path)

    def _read(self, node: int, nbytes: int) -> bytes | None:
        """A node's document; None if that node is lost."""
        data = bytearray()
        while len(data) < nbytes:
            ask = TracePiece(self._trace, node, len(data))
            piece = self._runtime.channel.call(ask).value
            if not piece:
                return None
            data += piece
        return bytes(data)


# Converts the nodes' records to a timeline for ui.perfetto.dev and chrome://tracing.
#
# The format (Chrome trace events, JSON) needs a single clock, and processes with tracks on which
# events do not overlap. Each node becomes such a process. Each of its workers has a track for its
# tasks, which may be nested but do not overlap otherwise. All other events are spread over as many
# tracks as needed to avoid overlaps. A node's times are shifted by the difference between its clock
# and the driver's.
#
# {"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}


# (driver host's time, lead of the node's clock, maximum error), in ns
Clock: TypeAlias = tuple[int, int, int]
TASK = KINDS_OF_EVENTS.index("task")
TRACKS_OF_NODE = 1_000_000  # range of track numbers for each node
TRACKS_OF_KIND = 10_000
CLOCKS_TEXT = (
    "Times are from the monotonic clock of the host that recorded the trace. Each other node's "
    "clock was compared with it several times at the beginning and at the end. The reply with the "
    "shortest round trip is used; its error is half the round trip. In between, the difference is "
    "interpolated. ahead_us, error_us: microseconds at the beginning and at the end."
)


def ahead_ns(clocks: list[Clock], at_ns: int) -> int:
    """How far a node's clock is ahead of the driver host's when it shows `at_ns`. The difference is
    interpolated between two comparisons, and constant before the first and after the last
    comparison."""
    if not clocks:
        return 0
    first, last = clocks[0], clocks[-1]
    begin, end = first[0] + first[1], last[0] + last[1]  # by the node's clock
    if end <= begin:
        return first[1]
    part = min(1.0, max(0.0, (at_ns - begin) / (end - begin)))
    return round(first[1] + part * (last[1] - first[1]))


class TraceText:
    """Produces the text in pieces: `head`, `node` for each node, `tail`."""

    def __init__(self, begin_ns: int, end_ns: int) -> None:
        """begin_ns, end_ns: the beginning and the end of the trace by the driver's clock. Events
        that began earlier are cut off at the trace's beginning; `began_before_us` is the length
        that was cut off."""
        self._begin_ns = begin_ns
        self._end_ns = end_ns
        self._first = True
        self._clocks: dict[str, Any] = {}
        self._dropped: dict[str, int] = {}
        self._events = 0

    def head(self) -> str:
        """The beginning of the file."""
        return '{"traceEvents":['

    def _line(self, event: dict[str, Any]) -> str:
        comma = "\n" if self._first else ",\n"
        self._first = False
        self._events += 1
        return comma + json.dumps(event, separators=(",", ":"), default=str, skipkeys=True)

    def node(self, number: int, data: bytes, clocks: list[Clock]) -> Iterator[str]:
        """The events of one node. Raises ProtocolError if the document is invalid."""
        name = f"h{number}"
        document, found = _document(number, data)
        self._dropped[name] = document.dropped
        self._clocks[name] = {
            "ahead_us": [clock[1] / 1000 for clock in clocks],
            "error_us": [clock[2] / 1000 for clock in clocks],
        }
        yield self._named("process_name", number, None, f"{name} ({document.host})")
        yield self._line(
            {
                "ph": "M", "name": "process_sort_index", "pid": number + 1,
                "args": {"sort_index": number},
            }
        )  # fmt: skip
        tracks = _Tracks(number)
        for event in found:
            self._place(event, clocks)
            tracks.add(event)
        for tid, track, events in tracks:
            yield self._named("thread_name", number, tid, track)
            for event in events:
                event["ts"] /= 1000
                event["dur"] /= 1000
                event["tid"] = tid
                yield self._line(event)

    def _place(self, event: dict[str, Any], clocks: list[Clock]) -> None:
        """Converts an event's times to the driver's clock, relative to the trace's beginning. The
        beginning and the end are each shifted by the difference at their own time, so that
        consecutive events do not overlap."""
        begin = event["ts"] - ahead_ns(clocks, event["ts"]) - self._begin_ns
        end = event.pop("end")
        end = max(begin, end - ahead_ns(clocks, end) - self._begin_ns)
        if begin < 0:
            event["args"]["began_before_us"] = -begin / 1000
        event["ts"] = max(0, begin)
        event["dur"] = max(0, end) - event["ts"]

    def _named(self, what: str, node: int, tid: int | None, name: str) -> str:
        event = {"ph": "M", "name": what, "pid": node + 1, "args": {"name": name}}
        return self._line(event if tid is None else event | {"tid": tid})

    def tail(self, lost: list[int], left: list[int], version: str) -> str:
        """The end of the file. `lost`, `left`: nodes that were lost or have left during the trace,
        so that their events are missing. Nodes in `left` belonged to programs that had joined, and
        had no workers."""
        names = [f"h{number}" for number in lost]
        dropped = {name: count for name, count in self._dropped.items() if count}
        text = ""
        for name in names:
            text += self._remark(f"node {name} was lost: its events are missing")
        for name, count in dropped.items():
            text += self._remark(f"{count} events of {name} were dropped (Config.trace_events_max)")
        other = {
            "program": f"hoplite_mp {version}",
            "seconds": (self._end_ns - self._begin_ns) / 1e9,
            "clocks": CLOCKS_TEXT,
            "nodes": self._clocks,
            "lost": names,
            "left": [f"h{number}" for number in left],
            "dropped": dropped,
        }
        return text + '\n],"displayTimeUnit":"ms","otherData":' + json.dumps(other) + "}\n"

    def _remark(self, text: str) -> str:
        at = (self._end_ns - self._begin_ns) / 1000
        return self._line({"ph": "i", "name": text, "s": "g", "ts": at, "pid": 1, "tid": 0})


class _Tracks:
    """The tracks of one node."""

    def __init__(self, node: int) -> None:
        self._base = (node + 1) * TRACKS_OF_NODE
        self._tasks: dict[int, list[dict[str, Any]]] = {}  # by client slot
        self._others: dict[str, list[dict[str, Any]]] = {}

    def add(self, event: dict[str, Any]) -> None:
        """`event["track"]` is a client slot, or the name of a track."""
        track = event.pop("track")
        tracks: dict[Any, Any] = self._tasks if isinstance(track, int) else self._others
        tracks.setdefault(track, []).append(event)

    def __iter__(self) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
        for slot, events in sorted(self._tasks.items()):
            name = f"worker {slot}"
            # If tasks begin at the same time, the outer task is first.
            events.sort(key=lambda event: (event["ts"], -event["dur"]))
            yield self._base + slot, name, events
        for kind, (name, events) in enumerate(sorted(self._others.items()), 1):
            for number, lane in enumerate(_lanes(events)):
                shown = name if not number else f"{name} {number + 1}"
                yield self._base + TRACKS_OF_KIND * kind + number, shown, lane


def _process(slot: int) -> str:
    return "driver" if slot == 1 else f"process {slot}"


def _lanes(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The fewest rows in which no events overlap."""
    lanes: list[list[dict[str, Any]]] = []
    free: list[tuple[int, int]] = []  # (when it is free, index of the lane)
    for event in sorted(events, key=lambda event: (event["ts"], event["dur"])):
        if free and free[0][0] <= event["ts"]:
            _, lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(event)
        heapq.heappush(free, (event["ts"] + event["dur"], lane))
    return lanes


def _document(number: int, data: bytes) -> tuple[TraceDocument, list[dict[str, Any]]]:
    """Decodes a node's document. Returns (the document, its events)."""
    try:
        document = msgspec.msgpack.decode(data, type=TraceDocument)
        return document, list(_events(number, document))
    except (msgspec.MsgspecError, struct.error, LookupError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes from h{number} are not a trace: {error}") from error


def _events(number: int, document: TraceDocument) -> Iterator[dict[str, Any]]:
    """The events of a document, with times in nanoseconds by that node's clock."""
    for slot, pid, packed in document.events:
        track = document.actors.get(pid, slot)
        for event in EVENT.iter_unpack(packed):
            oid, begin, end, kind, outcome, depth, rank, raw, bytes_in, bytes_out = event
            name = raw.split(b"\0")[0].decode(errors="replace")
            args: dict[str, Any] = {"pid": pid, "outcome": OUTCOMES_OF_EVENTS[outcome]}
            if kind == TASK:
                public = document.inbound_tasks.get(oid) or pack_id(document.host_id, oid)
                args = {"id": public.hex(), **args, "inside": depth - 1}
                args |= {"bytes_in": bytes_in, "bytes_out": bytes_out}
            else:
                args = {"call": oid, "rank": rank, **args, "bytes_in": bytes_in}
            yield {
                "ph": "X", "name": name or "?", "cat": KINDS_OF_EVENTS[kind], "pid": number + 1,
                "track": track if kind == TASK else f"{_process(slot)}: group calls",
                "ts": begin, "end": end, "args": args,
            }  # fmt: skip
    for kind_name, name, begin, end, more in document.trace_events:
        args = {key: _shown(key, value) for key, value in more.items()}
        if kind_name == "transfer":
            args["to"] = f"h{number}"
        yield {
            "ph": "X", "name": name, "cat": kind_name, "pid": number + 1,
            "track": _PLURAL[kind_name], "ts": begin, "end": end, "args": args,
        }  # fmt: skip


def _shown(key: str, value: Any) -> Any:
    if key == "from":
        return f"h{value}"
    return value.hex() if isinstance(value, bytes) else value


_PLURAL = {"transfer": "transfers", "collective": "collectives", "spill": "spilling"}
