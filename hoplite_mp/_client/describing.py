"""One-line descriptions of a ref and of a cluster, for prompts, debuggers and lists.

People look at a repr when something is wrong, so it must work then. It reads only this process's
own fields and shared memory. So it does not wait for a node that hangs, fetches nothing, and does
not raise, not even after the end of the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._client.memory import format_bytes
from hoplite_mp._common.object_states import AWAY, PENDING, STATE
from hoplite_mp._serialize.layout import BYTES, payload_kind

if TYPE_CHECKING:
    from hoplite_mp._client.ports import MembershipPort
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["cluster_words", "ref_words"]

_ENDED = {
    STATE["FAILED"]: "failed",
    STATE["CANCELLED"]: "cancelled",
    STATE["ABORTED"]: "cancelled",
    STATE["DELETED"]: "deleted",
    STATE["FREED"]: "gone",
    STATE["FREE"]: "gone",
}


def ref_words(runtime: MembershipPort, ref: ObjectRef[Any]) -> str:
    """ "float32 (1000,), 3.9 KiB, ready on h0"; may raise what reading the ref raises."""
    client = runtime.client
    oid = runtime.memory.local_id(ref)
    state = client.state(oid)
    if state in PENDING:
        return "pending"
    if state in _ENDED:
        return _ENDED[state]
    where = f"ready on h{runtime.tasks.node_number}"
    if state in AWAY:
        # What kind of object it is can only be read from its bytes, which are not here.
        size = client.inspect(oid)["size"]
        return f"{format_bytes(size)}, ready on another host or on disk"
    got = client.view(oid)
    if isinstance(got, int):  # its state has changed since it was read
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
    """What this process knows about its cluster."""
    fields = cluster.__dict__
    runtime, host, network = (fields.get(f"_{name}") for name in ("runtime", "host", "network"))
    base = fields.get("_base", cluster)
    if runtime is None or base._closed or not runtime.client.usable:
        return "closed"
    if host is None:
        return f"as {runtime.label} sees it"
    words = []
    if network is not None:
        words.append(f"at {network.address}, here h{runtime.tasks.node_number}")
    if host.attached:
        words.append("through the node of this host")
    else:
        words.append(f"{host.workers} worker{'' if host.workers == 1 else 's'} of this host")
    words.append(f"store of {format_bytes(host.limit)}")
    if host.lost:
        words.append("lost")
    return ", ".join(words)
