"""Prints workers' lines on the user's stdout and stderr, and in a notebook below the right cell.

A thread writes the lines, which arrive independently of results. A notebook's kernel shows output
below the cell that belongs to the writing thread's context, and a cell may end with a result before
earlier lines have arrived. Each cell therefore passes its context to the Printer when it begins,
and waits at its end until all lines printed so far are written. The code uses only IPython's events
and contextvars, so it works with any kernel.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from hoplite_mp._client.mapping import bars_aside
from hoplite_mp._protocol.output import LINES_MARK

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Printer"]

# How long a cell waits, at its end, for lines that are still in transit. With a higher value and a
# slow node, more lines appear below their own cell. With a lower value, a cell ends sooner when the
# node hangs.
CELL_WAIT_S = 1.0
# Like CELL_WAIT_S, but for a result whose timeout has passed. With a higher value, more lines
# appear before a polled result. With a lower value, a poll takes less time while the output is
# slow.
RESULT_WAIT_S = 0.02


class Printer:
    """Writes the lines of one host's workers for this process."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """ask(number): asks the node to send a mark with that number after all lines that workers
        have printed so far."""
        self._ask = ask
        self._numbers = itertools.count(1)
        self._awaited: dict[int, threading.Event] = {}
        self._context: contextvars.Context | None = None  # context of the current or latest cell
        self._events: Any = None

    def take(self, stream: int, label: str, line: bytes) -> None:
        """Handles one line or mark. Called only by the thread that reads them."""
        if stream == LINES_MARK:
            event = self._awaited.pop(int(label), None)
            if event is not None:
                event.set()
        elif self._context is None:
            _write(stream, label, line)
        else:
            self._context.run(_write, stream, label, line)

    # -- cells ---------------------------------------------------------------------------------

    def follow_cells(self) -> None:
        """Starts to follow the session's cells if this is an interactive IPython session."""
        events = _events_of_the_shell()
        if events is None:
            return
        self.cell_begins()
        self._events = events
        # The shell must not keep the cluster alive, because the user may drop it without closing
        # it.
        weak = weakref.ref(self)
        hooks = {"pre_run_cell": _call(weak, "cell_begins"), "post_run_cell": _call(weak, "wait")}
        for name, hook in hooks.items():
            events.register(name, hook)
        self._forget = weakref.finalize(self, _unregister, events, hooks)
        self._forget.atexit = False

    def cell_begins(self) -> None:
        """Causes later lines to be written in the caller's context."""
        self._context = contextvars.copy_context()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all lines that workers printed before this call are written, for at most
        CELL_WAIT_S. `timeout`: a shorter limit, but at least RESULT_WAIT_S."""
        limit = CELL_WAIT_S
        if timeout is not None:
            limit = min(limit, max(timeout, RESULT_WAIT_S))
        number, event = next(self._numbers), threading.Event()
        self._awaited[number] = event

        def ask() -> None:
            try:
                self._ask(number)
            except Exception:  # closed, or the node is gone: no more lines will arrive
                event.set()

        # In a thread, because `ask` blocks as long as the node does not read its messages.
        with contextlib.suppress(RuntimeError):  # if no thread can be started, there is no wait
            threading.Thread(target=ask, daemon=True, name="hoplite cell").start()
            event.wait(limit)
        self._awaited.pop(number, None)

    def end(self) -> None:
        """Ends all waits. Called in any thread when no more lines will arrive."""
        for event in list(self._awaited.values()):
            event.set()
        if self._events is not None:
            self._forget()


def _events_of_the_shell() -> Any:
    """IPython's events if IPython runs this session. Imports nothing."""
    found = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = found() if found is not None else None
    return getattr(shell, "events", None)


def _call(weak: weakref.ref[Printer], name: str) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        printer = weak()
        if printer is not None:
            getattr(printer, name)()

    return hook


def _unregister(events: Any, hooks: dict[str, Callable[[Any], None]]) -> None:
    for name, hook in hooks.items():
        with contextlib.suppress(ValueError):
            events.unregister(name, hook)


def _write(stream: int, label: str, line: bytes) -> None:
    target: Any = sys.stdout if stream == 1 else sys.stderr
    # A closed or broken stdout is the user's concern.
    with contextlib.suppress(Exception), bars_aside(target):
        target.write(f"({label}) {line.decode(errors='replace')}\n")
        target.flush()
