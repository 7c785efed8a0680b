"""What a reduction was made from goes when its result is read, if the process is idle, too."""

from __future__ import annotations

import numpy as np

import hoplite_mp
from tests.support.store import client, header, local_id
from tests.support.waiting import eventually


def test_sources_go_when_the_result_is_read() -> None:
    """No call of this process comes after `get`, and nothing in it waits for anything."""
    with hoplite_mp.Cluster(1, memory="64MiB") as c:
        refs = [c.put(np.full(50_000, float(n))) for n in range(4)]
        sources = [local_id(c, ref) for ref in refs]
        total = c.reduce(refs)
        eventually(lambda: header(c, total)["state"] == "SEALED")
        del refs
        assert c.get(total)[0] == 6
        held = [client(c).private_counts(oid) for oid in sources]
        assert held == [(0, 0)] * 4
        assert c.get(total)[-1] == 6
