"""Messages in which a node requests, and the manager returns, the plans that moved an object.

PlansRequested ─► PlansReported        at the request of a user (`Cluster.explain`)
"""

from __future__ import annotations

import msgspec

from hoplite_mp._protocol.fields import (
    KINDS,
    NODES_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    flags,
    numbers,
    object_id,
    one_of,
    seconds,
    text,
)

__all__ = [
    "NODES_REPORTED_MAX",
    "PLANS_REPORTED_MAX",
    "PlanSummary",
    "PlansReported",
    "PlansRequested",
]

# Maximum number of listed nodes of one plan; the others are only counted. Higher: longer answers,
# which must fit into one packet between a node and its client.
NODES_REPORTED_MAX = 64
PLANS_REPORTED_MAX = 16  # the latest plans of one object
ESTIMATES_MAX = 16
SHAPE_CHARS_MAX = 64
# "waiting": there is no plan yet, because sources are not ready; "replaced": a later plan has
# replaced this plan, or the object was no longer needed.
STATES = ("waiting", "running", "done", "replaced", "failed")


class PlanSummary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One plan, as recorded by the planner.

    `kind`: "copy" (requested by its receiver), or the kind of collective. `owners`: (node, number
    of shares, out of SHARES, that the node passes on, folds or sends). `estimates`: (shape, number
    of owners, seconds) of each alternative, the fastest first. `rates`: (node, up, down, whether
    the node has measured a rate), in bytes per second, as known to the planner. `finished`: the
    number of nodes that have finished. The last of them is `last_node`; it finished `last_s`
    seconds after the plan was made.
    """

    kind: str
    shape: str
    state: str
    nbytes: int
    sources: tuple[int, ...]
    source_count: int
    receivers: tuple[int, ...]
    receiver_count: int
    owners: tuple[tuple[int, int], ...]
    owner_count: int
    estimates: tuple[tuple[str, int, float], ...]
    rates: tuple[tuple[int, float, float, bool], ...]
    expected_s: float | None
    finished: int
    last_node: int
    last_s: float
    why: str

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("copy", *KINDS))
        one_of("state", self.state, STATES)
        text("shape", self.shape, SHAPE_CHARS_MAX)
        text("why", self.why, TEXT_CHARS_MAX)
        counts(
            nbytes=self.nbytes,
            source_count=self.source_count,
            receiver_count=self.receiver_count,
            owner_count=self.owner_count,
            finished=self.finished,
        )
        between("last_node", self.last_node, 0, NODES_MAX)
        for name, nodes in (("sources", self.sources), ("receivers", self.receivers)):
            numbers(name, nodes, NODES_MAX)
            between(f"number of {name}", len(nodes), 0, NODES_REPORTED_MAX)
        seconds("last_s", self.last_s)
        if self.expected_s is not None:
            seconds("expected_s", self.expected_s)
        self._check_rows()

    def _check_rows(self) -> None:
        for name, rows, most in (
            ("owners", self.owners, NODES_REPORTED_MAX),
            ("estimates", self.estimates, ESTIMATES_MAX),
            ("rates", self.rates, NODES_REPORTED_MAX),
        ):
            between(f"number of {name}", len(rows), 0, most)
        for node, shares in self.owners:
            counts(node=node, shares=shares)
        for shape, owners, estimate in self.estimates:
            text("shape", shape, SHAPE_CHARS_MAX)
            counts(owners=owners)
            seconds("estimate", estimate)
        for node, up, down, measured in self.rates:
            counts(node=node)
            seconds("up", up)
            seconds("down", down)
            flags(measured=measured)


class PlansRequested(Message, frozen=True, tag="PlansRequested"):
    """Requests the plans of that object, or of the collective with that result."""

    request: int
    node: int
    object: bytes

    def __post_init__(self) -> None:
        counts(request=self.request, node=self.node)
        object_id("object", self.object)


class PlansReported(Message, frozen=True, tag="PlansReported"):
    """The answer to PlansRequested: the recorded plans, the latest plan last."""

    request: int
    plans: tuple[PlanSummary, ...]

    def __post_init__(self) -> None:
        counts(request=self.request)
        between("number of plans", len(self.plans), 0, PLANS_REPORTED_MAX)
