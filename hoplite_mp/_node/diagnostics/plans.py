"""Asks the manager for the plans of an object, at the request of a process (`Cluster.explain`).

A plan states which node sends which part of the object to which other node."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._node.questions import PATIENCE_S
from hoplite_mp._protocol.local import Explain, Reply
from hoplite_mp._protocol.messages import PlansReported, PlansRequested

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.dispatch import Handler
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.local import Request
    from hoplite_mp._protocol.plans import PlanSummary

__all__ = ["PlanRequests"]


class PlanRequests:
    """The requests that the manager has not answered yet."""

    def __init__(self, host: HostContext) -> None:
        self.client = host.client
        self.imports = host.imports
        self.loop = host.loop
        self.replier = host.replier
        self.send_manager = host.send_manager
        self.open: dict[int, Callable[[tuple[PlanSummary, ...] | None], None]] = {}
        self._last = 0

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers of requests from processes."""
        return {Explain: self.ask}

    def ask(self, slot: int, request: Request) -> None:
        """Forwards a process's request to the manager. If no manager answers, the reply is None
        after PATIENCE_S."""
        self._last += 1
        reply, number = self.replier(slot), self._last

        def done(plans: tuple[PlanSummary, ...] | None) -> None:
            reply(Reply(request.number, plans))

        self.open[number] = done
        object_id = self.imports.public(request.ask.oid)  # type: ignore[union-attr]
        self.send_manager(PlansRequested(number, self.client.number, object_id))
        self.loop.call_later(PATIENCE_S, partial(self._end, number, None))

    def answer(self, message: PlansReported) -> None:
        """Handles the manager's answer."""
        self._end(message.request, message.plans)

    def _end(self, number: int, plans: tuple[PlanSummary, ...] | None) -> None:
        done = self.open.pop(number, None)
        if done is not None:
            done(plans)
