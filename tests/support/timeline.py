"""A trace file of a cluster, read and checked."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SLACK_US = 0.002  # numbers in the file have three digits after the point


class Timeline:
    """A trace file, read."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text())
        self.other: dict[str, Any] = found["otherData"]
        self.events: list[dict[str, Any]] = [e for e in found["traceEvents"] if e["ph"] == "X"]
        self.said = [e["name"] for e in found["traceEvents"] if e["ph"] == "i"]
        self.tracks = {
            e["tid"]: e["args"]["name"]
            for e in found["traceEvents"]
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        assert {e["tid"] for e in self.events} <= self.tracks.keys()
        self.check_tracks()

    def of(self, cat: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["cat"] == cat]

    def outcomes(self) -> dict[str, list[str]]:
        """Of tasks, by id."""
        found: dict[str, list[str]] = {}
        for task in self.of("task"):
            found.setdefault(task["args"]["id"], []).append(task["args"]["outcome"])
        return found

    def check_tracks(self) -> None:
        """Nothing overlaps, but what runs in place lies wholly inside what waits for it."""
        length = self.other["seconds"] * 1e6
        for tid, track in itertools.groupby(
            sorted(self.events, key=lambda e: (e["tid"], e["ts"], -e["dur"])), lambda e: e["tid"]
        ):
            around: list[float] = []
            for event in track:
                begin, end = event["ts"], event["ts"] + event["dur"]
                assert 0 <= begin <= end <= length + SLACK_US, (tid, event)
                while around and around[-1] <= begin + SLACK_US:
                    around.pop()
                assert not around or end <= around[-1] + SLACK_US, (tid, event)
                inside = event["args"].get("inside", 0)
                assert len(around) == inside or "began_before_us" in event["args"], event
                around.append(end)
