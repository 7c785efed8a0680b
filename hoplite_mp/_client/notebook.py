"""How a Cluster is shown in a notebook: its nodes, their workers, and memory as bars.

A notebook shows HTML where a terminal shows a repr. It is plain HTML without scripts, and all names
and addresses in it are escaped. Unlike the repr it asks the nodes, but it does not wait for one
that does not answer soon, and raises nothing.
"""

from __future__ import annotations

import html
import queue
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp._client.memory import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ANSWER_WAIT_S", "cluster_html", "in_time"]

# How long a cell waits for the nodes. Higher: slow nodes are shown; lower: a cell ends sooner when
# the cluster is in trouble.
ANSWER_WAIT_S = 2.0
_BAR = (
    '<div style="width:12em;height:.8em;border:1px solid currentColor;border-radius:3px;'
    'overflow:hidden" title="{title}"><div style="width:{percent:.0f}%;height:100%;'
    'background:{color}"></div></div>'
)
_CELL = '<td style="text-align:left">{}</td>'
_HEAD = '<th style="text-align:left">{}</th>'
_FULL = 0.9


def in_time(ask: Callable[[], Any]) -> Any:
    """What `ask` returns; None if it raises, or takes longer than ANSWER_WAIT_S."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except Exception:  # closed, or lost
            answers.put(None)

    threading.Thread(target=work, name="hoplite_mp html", daemon=True).start()
    try:
        return answers.get(timeout=ANSWER_WAIT_S)
    except queue.Empty:
        return None


def cluster_html(words: str, address: str | None, nodes: Sequence[Any] | None, here: str) -> str:
    """words: what is known without asking. nodes: None if they have not answered. here: the id of
    this process's node."""
    title = "hoplite_mp.Cluster"
    if address is not None:
        title += f" at {address}"
    head = f"<div><strong>{html.escape(title)}</strong></div>"
    if nodes is None:
        return f"<div>{head}<div>{html.escape(words)}</div></div>"
    workers = sum(node.workers for node in nodes)
    used, total = (sum(getattr(node, name) for node in nodes) for name in _MEMORY)
    summary = (
        f"{_count(len(nodes), 'node')}, {_count(workers, 'worker')}, "
        f"{format_bytes(used)} of {format_bytes(total)} used"
    )
    names = "".join(map(_HEAD.format, ("node", "host", "address", "workers", "memory", "")))
    rows = "".join(f"<tr>{''.join(map(_CELL.format, _row(node, here)))}</tr>" for node in nodes)
    return (
        f"<div>{head}<div>{html.escape(summary)}</div>"
        f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


_MEMORY = ("memory_used", "memory_total")


def _row(node: Any, here: str) -> tuple[str, ...]:
    used = f"{format_bytes(node.memory_used)} of {format_bytes(node.memory_total)}"
    share = min(1.0, node.memory_used / max(1, node.memory_total))
    color = "#c0392b" if share > _FULL else "#2e86c1"
    bar = _BAR.format(title=html.escape(used), percent=100 * share, color=color)
    name = f"{node.id} (here)" if node.id == here else node.id
    cells = (name, node.host, node.address, str(node.workers))
    return (*map(html.escape, cells), bar, html.escape(used))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
