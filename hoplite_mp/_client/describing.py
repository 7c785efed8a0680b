"""Descriptions of refs and clusters: one line for prompts and debuggers, HTML for notebooks.

Users look at a repr when a program misbehaves, so it must work even in that situation. A repr reads
only this process's fields and shared memory. It does not wait for a node that hangs, fetches
nothing, and raises no exception, even after the cluster has stopped.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._common.object_states import AWAY, PENDING, STATE
from hoplite_mp._serialize.layout import BYTES, payload_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._client.ports import MembershipPort
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["ANSWER_WAIT_S", "cluster_html", "cluster_words", "in_time", "ref_words"]


_ENDED = {
    STATE["FAILED"]: "failed",
    STATE["CANCELLED"]: "cancelled",
    STATE["ABORTED"]: "cancelled",
    STATE["DELETED"]: "deleted",
    STATE["FREED"]: "gone",
    STATE["FREE"]: "gone",
}


def ref_words(runtime: MembershipPort, ref: ObjectRef[Any]) -> str:
    """A ref's description, such as "float32 (1000,), 3.9 KiB, ready on h0". May raise the same
    errors as reading the ref."""
    client = runtime.client
    oid = runtime.memory.local_id(ref)
    state = client.state(oid)
    if state in PENDING:
        return "pending"
    if state in _ENDED:
        return _ENDED[state]
    where = f"ready on h{runtime.tasks.node_number}"
    if state in AWAY:
        # The kind of the object can only be read from its bytes, which are not here.
        size = client.inspect(oid)["size"]
        return f"{format_bytes(size)}, ready on another host or on disk"
    got = client.view(oid)
    if isinstance(got, int):  # the state has changed since it was read
        return _ENDED.get(got, "ready")
    mem = memoryview(got)
    return f"{_kind(mem)}, {format_bytes(mem.nbytes)}, {where}"


def _kind(mem: memoryview) -> str:
    array = _serialize.describe_array(mem)
    if array is not None:
        name = str(_serialize.named_dtype(array.dtype_name))
        return f"{name} {array.shape}" if array.shape else name
    return "bytes" if payload_kind(mem) == BYTES else "object"


def cluster_words(cluster: Any) -> str:
    """A description of the cluster, based on this process's own data."""
    fields = cluster.__dict__
    runtime, host, network = (fields.get(f"_{name}") for name in ("runtime", "host", "network"))
    base = fields.get("_base", cluster)
    if runtime is None or base._closed or not runtime.client.usable:
        return "closed"
    if host is None:
        return f"in {runtime.label}"
    words = []
    if network is not None:
        words.append(f"at {network.address}, here h{runtime.tasks.node_number}")
    if host.attached:
        words.append("through the node of this host")
    else:
        words.append(f"{host.workers} worker{'' if host.workers == 1 else 's'} on this host")
    words.append(f"store of {format_bytes(host.limit)}")
    if host.lost:
        words.append("lost")
    return ", ".join(words)


# The HTML of a Cluster in a notebook: its nodes, their workers, and memory as bars.
#
# A notebook shows HTML in place of a repr. It is plain HTML without scripts, in which all names and
# addresses are escaped. Unlike the repr, it requires requests to the nodes, but it does not wait
# for slow nodes, and raises no exception.


# How long a cell waits for the nodes. A higher value shows slower nodes, too. With a lower value, a
# cell finishes sooner if the cluster has problems.
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
    """The result of `ask`; None if `ask` raises an exception, or takes longer than
    ANSWER_WAIT_S."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except Exception:  # the cluster is closed or lost
            answers.put(None)

    threading.Thread(target=work, name="hoplite_mp html", daemon=True).start()
    try:
        return answers.get(timeout=ANSWER_WAIT_S)
    except queue.Empty:
        return None


def cluster_html(words: str, address: str | None, nodes: Sequence[Any] | None, here: str) -> str:
    """The HTML for a cluster. words: the description without requests. nodes: None if the nodes
    have not replied. here: the id of this process's node."""
    import html  # few programs show a cluster in a notebook

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
    import html

    used = f"{format_bytes(node.memory_used)} of {format_bytes(node.memory_total)}"
    share = min(1.0, node.memory_used / max(1, node.memory_total))
    color = "#c0392b" if share > _FULL else "#2e86c1"
    bar = _BAR.format(title=html.escape(used), percent=100 * share, color=color)
    name = f"{node.id} (here)" if node.id == here else node.id
    cells = (name, node.host, node.address, str(node.workers))
    return (*map(html.escape, cells), bar, html.escape(used))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
