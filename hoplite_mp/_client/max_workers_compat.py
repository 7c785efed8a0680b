"""How many workers an executor has, for programs that read that from the standard library's ones.

Why it exists: dask and others read the private attribute `_max_workers` of any executor that they
are given, to decide how many tasks to send at a time.
It must never know: how workers are started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.local import Members

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime

__all__ = ["Sized"]

WORKERS_FIELD = 3  # index in a node's entry in the reply to Members


class Sized:
    """An executor over one pool of workers."""

    _runtime: Runtime
    _pool: int

    @property
    def _max_workers(self) -> int:
        """The size of its own pool, or of all nodes' common workers together; at least one."""
        runtime = self._runtime
        known = runtime.pool_sizes.get(self._pool)
        if known is None:
            found = runtime.channel.call(Members()).value
            known = sum(node[WORKERS_FIELD] for node in found)
        return max(1, known)
