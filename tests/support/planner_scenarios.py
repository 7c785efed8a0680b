"""Scenarios as text: commands, then everything the planner said to them.

A file under `tests/planner/scenarios/` is a sequence of blocks, separated by empty lines:

    # why this is interesting
    request 7 sources=abc num=2
    ready 7 1
    ----
    nothing
    -> node 0: ...

One paragraph of output per command, in order; `nothing` is an output too. Letters in `sources`
stand for object ids. `at 2.5` moves the clock; a wake-up that falls due on the way is a tick at
its own time. `HOPLITE_MP_REWRITE=1 pytest tests/planner` writes the outputs anew, for the diff to
be reviewed.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.fields import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

RULER = "----"


def letter_id(letter: str) -> bytes:
    """The object id that a letter stands for."""
    return letter.encode() * 16


def run_scenario(text: str) -> str:
    """The file `text` with the outputs that the planner gives today."""
    stage = Stage()
    blocks = [block for block in text.strip("\n").split("\n\n") if block.strip()]
    return "\n\n".join(stage.play(block) for block in blocks) + "\n"


class Stage:
    """A planner, a clock and the verbs of the scenario language."""

    def __init__(self) -> None:
        self.planner = Planner(boards_max=2, operations_max=4)
        self.now = 0.0
        self.wake_at: float | None = None

    def play(self, block: str) -> str:
        script = block.split(f"\n{RULER}")[0].splitlines()
        output = [self.command(line) for line in script if not line.startswith("#")]
        return "\n".join([*script, RULER, *output] if output else script)

    def command(self, line: str) -> str:
        verb, *words = shlex.split(line)
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=", 1) for word in words if "=" in word)
        if verb == "at":
            return self.wait_until(float(plain[0]))
        return self.step(VERBS[verb](plain, named))

    def step(self, message: m.NodeToManager) -> str:
        plan = self.planner.step(message, self.now)
        self.wake_at = plan.wake_at
        return plan.as_text()

    def wait_until(self, time: float) -> str:
        lines = []
        while self.wake_at is not None and self.wake_at <= time:
            self.now = self.wake_at
            plan = self.planner.tick(self.now)
            self.wake_at = plan.wake_at
            lines.append(f"tick at {self.now:g}\n{plan.as_text()}")
        self.now = time
        return "\n".join(lines) or "nothing"


Words = list[str]
Named = dict[str, str]


def _number(named: Named, name: str, default: int = 0) -> int:
    return int(named.get(name, default))


def _indices(named: Named, name: str) -> tuple[int, ...]:
    return tuple(int(word) for word in named.get(name, "").split(",") if word)


def _request(words: Words, named: Named) -> m.ReduceRequested:
    sources = tuple(letter_id(letter) for letter in named["sources"])
    return m.ReduceRequested(
        operation=int(words[0]),
        node=_number(named, "node"),
        caller=1,
        sources=sources,
        op="sum",
        num=_number(named, "num", len(sources)),
        deadline_s=float(named["deadline"]) if "deadline" in named else None,
        reproducible="reproducible" in words,
        kind=next((word for word in words if word in KINDS), "reduce"),
        ready=_indices(named, "ready"),
        to=_indices(named, "to"),
        results=tuple(letter_id(letter) for letter in named.get("results", "")),
    )


def _ready(words: Words, named: Named) -> m.SourceReady:
    return m.SourceReady(
        int(words[0]),
        int(words[1]),
        _number(named, "node"),
        _number(named, "nbytes"),
        named.get("layout", "").encode(),
    )


def _joined(words: Words, named: Named) -> m.NodeJoined:
    """The number is only for the reader: host ids are chosen so that it is what is given."""
    host_id = 700 + int(words[0])
    return m.NodeJoined(host_id, _number(named, "incarnation", 1), 4)


def _fetch(words: Words, named: Named) -> m.FetchRequested:
    holders = _indices(named, "holders")
    return m.FetchRequested(_number(named, "node"), letter_id(words[0]), 64 << 20, holders)


def _fetched(words: Words, named: Named) -> m.FetchComplete:
    return m.FetchComplete(_number(named, "node"), letter_id(words[0]), _number(named, "epoch"))


def _parent_failed(words: Words, named: Named) -> m.FetchFailed:
    node, epoch, parent = (_number(named, name) for name in ("node", "epoch", "parent"))
    return m.FetchFailed(node, letter_id(words[0]), epoch, parent, named.get("reason", "reset"))


def _host(words: Words, named: Named) -> m.HostMeasured:
    return m.HostMeasured(int(words[0]), float(named["up"]), float(named["down"]))


def _link(words: Words, named: Named) -> m.LinkMeasured:
    rate = float(named["rate"]) if "rate" in named else None
    return m.LinkMeasured(int(words[0]), int(words[1]), float(named["latency"]), rate)


def _execution_failed(words: Words, named: Named) -> m.ExecutionFailed:
    return m.ExecutionFailed(
        operation=int(words[0]),
        epoch=_number(named, "epoch"),
        node=_number(named, "node"),
        reason=named["reason"],
        failed_sources=_indices(named, "sources"),
    )


def _client(named: Named) -> tuple[int, int, int]:
    return _number(named, "node"), _number(named, "client"), _number(named, "generation", 1)


def _group_join(words: Words, named: Named) -> m.GroupJoinRequested:
    rank = int(named["rank"]) if "rank" in named else None
    founders = tuple(
        (int(before), _number(named, "node"), int(client), 1)
        for before, client in (pair.split(":") for pair in named.get("founders", "").split())
    )
    return m.GroupJoinRequested(
        int(named["request"]),
        *_client(named),
        words[0],
        _number(named, "size"),
        rank,
        8,
        parent=_number(named, "parent"),
        founders=founders,
    )


def _group_left(words: Words, named: Named) -> m.GroupLeft:
    name, generation = words[0].split("#")
    return m.GroupLeft(name, int(generation), _number(named, "rank"), *_client(named))


def _group_admitted(words: Words, named: Named) -> m.GroupAdmitted:
    name, generation = words[0].split("#")
    return m.GroupAdmitted(name, int(generation), _number(named, "rank"))


VERBS: dict[str, Callable[[Words, Named], Any]] = {
    "node-joined": _joined,
    "node-leaving": lambda w, n: m.NodeLeaving(int(w[0]), _number(n, "incarnation", 1)),
    "host": _host,
    "link": _link,
    "fetch": _fetch,
    "fetched": _fetched,
    "parent-failed": _parent_failed,
    "copy-dropped": lambda w, n: m.CopyDropped(_number(n, "node"), letter_id(w[0])),
    "gone": lambda w, n: m.ObjectDeleted(letter_id(w[0])),
    "node-lost": lambda w, n: m.NodeLost(int(w[0]), _number(n, "incarnation", 1)),
    "client-lost": lambda w, n: m.ClientLost(*_client(n)),
    "request": _request,
    "ready": _ready,
    "failed": lambda w, n: m.SourceFailed(int(w[0]), int(w[1]), n.get("reason", "lost")),
    "complete": lambda w, n: m.StripesComplete(int(w[0]), _number(n, "epoch"), _number(n, "node")),
    "execution-failed": _execution_failed,
    "dropped": lambda w, n: m.OperationDropped(int(w[0])),
    "group-join": _group_join,
    "group-left": _group_left,
    "group-admitted": _group_admitted,
    "actor-claims": lambda w, n: m.ActorNameClaimed(
        int(n.get("request", "0")), _number(n, "node"), w[0], letter_id(w[1])
    ),
    "actor-query": lambda w, n: m.ActorNameQuery(int(n["request"]), _number(n, "node"), w[0]),
    "actor-ended": lambda w, n: m.ActorNameReleased(_number(n, "node"), w[0], letter_id(w[1])),
}
