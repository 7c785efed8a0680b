"""Objects that are on their way to this host, for people before whom one hangs.

Why it exists: see node/inspect/waits.py.
It must never know: how bytes move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp.node.collectives.transfers import Transfers
    from hoplite_mp.node.membership.links import Links

__all__ = ["transfer_waits"]


def transfer_waits(links: Links, transfers: Transfers) -> Iterator[dict[str, Any]]:
    """Cells that other nodes fill, and objects whose plan has not come yet."""
    now_ns = links.loop.now_ns()
    for cell, pulling in list(links.pulling.items()):
        about = pulling.wanting.describe(cell)
        yield {
            "object": about.get("object", b"").hex(),
            "operation": about.get("operation"),
            "kind": about.get("kind", ""),
            "come": links.engine.watermark(cell),
            "bytes": about.get("bytes", 0),
            "from": f"h{pulling.parent}",
            "seconds": round((now_ns - pulling.begin_ns) / 1e9, 3),
        }
    moving = {transfer.plan.object for transfer in transfers.by_epoch.values()}
    for object_id, oid in list(transfers.fetching.items()):
        place = transfers.places.places.get(oid)
        if object_id not in moving and place is not None:
            yield {
                "object": object_id.hex(),
                "operation": None,
                "kind": "not planned yet",
                "come": 0,
                "bytes": place.nbytes,
                "from": ", ".join(f"h{holder}" for holder in place.holders),
                "seconds": None,
            }
