"""Names and words that standard terms have replaced do not come back.

docs/glossary.md has the terms that the code uses. A name leaves these lists only with a reason in
the commit.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "hoplite_mp"
PATHS = sorted(PACKAGE.rglob("*.py"))
RETIRED_CLASSES = (
    "About", "Above", "ActorAsk", "ActorBegins", "ActorBegun", "ActorFound", "ActorHeld",
    "ActorKept", "ActorMayEnd", "ActorMoves", "ActorNameAsked", "ActorNameHeld", "ActorSought",
    "ActorStateAsked", "Actors", "Alone", "Aside", "Ask", "AssignedAsked", "Beats", "BeginActor",
    "BeginRound", "Bell", "Beside", "Between", "Birth", "BoardCalls", "Box", "Bringing", "Caller",
    "Calling", "Carried", "ClientEnds", "ClientLines", "ClockAsked", "CloseFarPool", "CopiesAsked",
    "CopiesTold", "Copy", "CopyCensus", "CopyHeld", "CountersAsked", "CountersNow", "Delays",
    "Delegation", "Described", "DistributeHeld", "Door", "DriverDoor", "DropActor", "DumpAsked",
    "EndActorThere", "EndFarRound", "EndRound", "Ending", "Ends", "Engine", "Entry",
    "EverywhereCalls", "Execution", "FarActors", "FarAsker", "FarHosts", "FarOutput",
    "FarPoolOpened", "FarRoundEnded", "FarRoundOpened", "FarWorkers", "Fixed", "Follows",
    "ForeignHolds", "Forest", "Forests", "FormerDrivers", "GiveBack", "GiveSpans", "GivenUp",
    "GoneNodes", "GroupBell", "GroupEnds", "GroupGivenUp", "GroupGo", "GroupHeld", "GroupReceived",
    "GroupSent", "GroupSentTaken", "GroupSmall", "GroupTasksAsked", "GroupTasksOver",
    "GroupWritten", "Groups", "Guest", "Guests", "Held", "HeldUp", "Holdings", "HoldingsReported",
    "Host", "HostsMember", "KeepActor", "KeepActorState", "KeepForStream", "Kept", "KeptCluster",
    "Knows", "Lan", "LanUpward", "LastLinesAsked", "LastLinesSent", "Leading", "Leads", "Leaving",
    "Ledger", "Lent", "LetGo", "Letter", "Life", "Lines", "Located", "Look", "LookMessage",
    "LookTold", "Loop", "MakeAgain", "Management", "ManagerCalls", "Managing", "Mapped",
    "MarkLines", "Meeting", "Membership", "Meter", "Missing", "Network", "NotAttached", "NotLed",
    "NotSpawned", "Notes", "ObjectGone", "OpenFarPool", "OpenFarRound", "OpenRound", "Outcome",
    "OwnerAsked", "OwnerTold", "Owners", "OwnersKnown", "OwnersNamed", "PairMeter", "Part",
    "PartWriter", "PeerCalls", "Plan", "PlanExecution", "PlanExecutor", "Printed", "PrintedTaken",
    "Probed", "Process", "Processes", "Promoted", "Pulse", "Recovering", "ReduceHeld", "RelayAsked",
    "Reported", "ResourceAsk", "RestartsAsked", "RestartsTold", "RestoredGroups", "Restoring",
    "Returns", "Rooms", "Round", "Rounds", "Row", "Rows", "Rule", "Run", "SetUp", "SetupFailed",
    "SmallCalls", "Spare", "Spares", "Stacks", "StandbyNamed", "Standing", "StandingRequests",
    "State", "StreamingSource", "StreamingSources", "Surroundings", "TakeBroadcastTasks",
    "TakeResources", "TakeRound", "TraceAsked", "TraceRead", "Trap", "Trees", "Tried", "Truth",
    "TryAgain", "Underway", "UnlessEnded", "Upward", "UsersOfNode", "Voice", "VoteAsked", "Voted",
    "VotedCalls", "Voting", "Waits", "Wanted", "Watch", "Wire", "WorkerBroadcastAsk", "WorkersNow",
)  # fmt: skip
RETIRED_MODULES = (
    "actor_looks", "actor_moves", "actor_spares", "announcing", "aside", "beats",
    "being_member", "beside", "birth", "board_calls", "boxes", "calling", "client_ends",
    "client_lines", "copy_census", "delegation", "door", "doors", "drop_in", "elsewhere",
    "ending", "entering", "everywhere", "execute", "far_actors", "far_hosts", "far_output",
    "far_workers", "forest", "forests", "former_drivers", "fresh", "full", "group_ends",
    "group_restoring", "group_returns", "guests", "headers", "holdings", "hosting", "keeper",
    "keeping", "kinds", "lan_wiring", "last_words", "lasting", "leading", "lent", "letters",
    "life", "looking", "losing", "machine", "managing", "member", "meter", "missing", "nearby",
    "nesting", "notes", "pair_meter", "part_writer", "peer_calls", "plan_execution",
    "plan_executor", "pulse", "recovering", "restoring", "room", "rooms", "rounds", "rule",
    "scarce", "serving", "shell", "sizes", "standing", "steps", "streaming_source",
    "surroundings", "taking", "timely", "traps", "trees", "truth", "voice", "voted_calls",
    "warming", "wires", "wiring",
)  # fmt: skip
# Words that comments and docstrings do not use. The list grows as the prose is rewritten.
FORBIDDEN_WORDS = (
    "audience", "bell", "birth", "box", "census", "door", "guest", "meter", "pulse",
    "rooms", "trap", "voice",
)  # fmt: skip


def test_retired_class_names_are_not_defined() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {one.name}"
        for path in PATHS
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.ClassDef) and one.name in RETIRED_CLASSES
    }
    assert not found


def test_retired_module_names_are_not_used() -> None:
    names = {path.stem if path.stem != "__init__" else path.parent.name for path in PATHS}
    assert not names & set(RETIRED_MODULES)


def test_class_names_are_defined_once() -> None:
    """Reduction is the same interface twice: what `reduce` returns for Dask and for Ray."""
    seen: dict[str, list[str]] = {}
    for path in PATHS:
        for one in ast.parse(path.read_text()).body:
            if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
                seen.setdefault(one.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name for name, paths in seen.items() if len(paths) > 1} <= {"Reduction"}


def prose_of(text: str) -> list[tuple[int, str]]:
    """(line, text) of each comment and docstring, without names in backticks."""
    found = [
        (one.start[0], one.string)
        for one in tokenize.generate_tokens(io.StringIO(text).readline)
        if one.type == tokenize.COMMENT
    ]
    for one in ast.walk(ast.parse(text)):
        is_docstring = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        if is_docstring and isinstance(one.value.value, str):
            found.append((one.lineno, one.value.value))
    return [(line, re.sub(r"`[^`\n]*`", "", words)) for line, words in found]


def test_forbidden_words_are_not_in_comments_and_docstrings() -> None:
    word = re.compile(rf"\b(?:{'|'.join(FORBIDDEN_WORDS)})s?\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {match[0]}"
        for path in PATHS
        for line, words in prose_of(path.read_text())
        for match in word.finditer(words)
    ]
    assert not found
