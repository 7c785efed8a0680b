"""Lines of workers on the user's stdout and stderr, and below the right cell of a notebook.

Why it exists: a thread writes the lines, and lines come by another way than results. In a notebook
both matter: a kernel files what is written under the cell that the writing thread's context names,
and a result may end its cell before the lines that were printed ahead of it have come. So each cell
hands its context over as it begins, and as it ends waits until everything that workers have printed
so far is written. It uses nothing of a kernel's own: only IPython's events and contextvars.
It must never know: how lines travel.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from hoplite_mp.client.progress import bars_aside
from hoplite_mp.protocol.output import LINES_MARK

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Printer"]

# At the end of a cell, for lines that are on their way. Higher: more of them stand below their cell
# when the node is slow; lower: a cell ends sooner when it stands still.
CELL_WAIT_S = 1.0


class Printer:
    """Writes the lines of one host's workers for this process."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """ask(number): wants the mark of that number behind all lines that were printed so far."""
        self._ask = ask
        self._numbers = itertools.count(1)
        self._awaited: dict[int, threading.Event] = {}
        self._context: contextvars.Context | None = None  # of the cell that runs, or ran last
        self._events: Any = None

    def take(self, stream: int, label: str, line: bytes) -> None:
        """One line, or a mark; in the thread that reads them, and in no other one."""
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
        """From now on, if this is an interactive session of IPython."""
        events = _events_of_the_shell()
        if events is None:
            return
        self.cell_begins()
        self._events = events
        # The shell does not keep the cluster: it may be dropped without a shutdown.
        weak = weakref.ref(self)
        hooks = {"pre_run_cell": _call(weak, "cell_begins"), "post_run_cell": _call(weak, "wait")}
        for name, hook in hooks.items():
            events.register(name, hook)
        self._forget = weakref.finalize(self, _unregister, events, hooks)
        self._forget.atexit = False

    def cell_begins(self) -> None:
        """The calling context is the one of the lines that come now."""
        self._context = contextvars.copy_context()

    def wait(self) -> None:
        """Everything that workers had printed before this call is written, unless that takes
        longer than CELL_WAIT_S."""
        number, event = next(self._numbers), threading.Event()
        self._awaited[number] = event

        def ask() -> None:
            try:
                self._ask(number)
            except Exception:  # closed, or its node is gone: nothing comes any more
                event.set()

        # In a thread, as another one may be in the middle of a question to the node, for long.
        with contextlib.suppress(RuntimeError):  # there is none: lines come when they come
            threading.Thread(target=ask, daemon=True, name="hoplite cell").start()
            event.wait(CELL_WAIT_S)
        self._awaited.pop(number, None)

    def end(self) -> None:
        """No lines come any more. In any thread."""
        for event in list(self._awaited.values()):
            event.set()
        if self._events is not None:
            self._forget()


def _events_of_the_shell() -> Any:
    """IPython's, if it runs this session; nothing is imported for that."""
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
    # A closed or broken stdout of the user's is not ours.
    with contextlib.suppress(Exception), bars_aside(target):
        target.write(f"({label}) {line.decode(errors='replace')}\n")
        target.flush()
