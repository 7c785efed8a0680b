"""What `explain` says, on real nodes in virtual time: its figures do not depend on the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.simulations import LINK_BYTES_PER_S, play_without_faults

if TYPE_CHECKING:
    from hoplite_mp import Explanation
    from hoplite_mp._simulation.workloads.workload import Workload

HOSTS = 4
NBYTES = 8 << 20


def explained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Explanation]:
    """One program of host 0, which moves objects in each way and has them explained."""
    found: dict[str, Explanation] = {}

    def program(c: Any) -> None:
        nodes = [node for node in c.nodes if node.workers]
        array = np.ones(NBYTES // 4, np.float32)
        mine, small = c.put(array), c.put(1)
        found["local"], found["small"] = c.explain(mine), c.explain(small)
        done = c.broadcast(mine, to=nodes)
        done.result()
        found["broadcast"], found["its object"] = c.explain(done), c.explain(mine)
        far = c.options(node=nodes[1]).submit(np.ones, NBYTES // 8)
        c.wait(far)
        found["not here"] = c.explain(far)
        c.get(far)
        found["copy"] = c.explain(far)
        parts = [c.options(node=node).submit(np.ones, NBYTES // 8) for node in nodes]
        total = c.reduce(parts)
        c.wait(total)
        found["reduce"] = c.explain(total)
        c.delete(mine)
        found["deleted"] = c.explain(mine)

    def begin(work: Workload) -> None:
        work.program(work.hosts()[0], "explains", program)

    play_without_faults(monkeypatch, HOSTS, begin)
    return found


def test_explain_for_each_kind_of_transfer_returns_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(monkeypatch)
    shapes = {name: [plan.shape for plan in one.plans] for name, one in found.items()}
    assert shapes == {
        "local": [],
        "small": [],
        "broadcast": ["stripes"],
        "its object": ["stripes"],
        "not here": [],
        "copy": ["direct copy"],
        "reduce": ["stripes"],
        "deleted": ["stripes"],
    }
    own = found["local"].locations
    assert found["local"].why == f"no transfer: processes of {own[0]} read it in shared memory"
    assert found["small"].why.startswith("no plan: values up to 64 KiB are sent")
    assert found["not here"].why == f"no transfer: {own[0]} has not requested it yet"
    assert [found[name].state for name in ("copy", "deleted")] == ["ready", "deleted"]
    assert len(found["its object"].locations) == HOSTS
    for name in ("broadcast", "copy", "reduce"):
        (plan,) = found[name].plans
        assert plan.state == "done"
        assert plan.expected_s is not None
        assert plan.elapsed_s is not None
        # At least the bytes over one link, and not far from the estimate.
        assert plan.elapsed_s > 0.9 * NBYTES / LINK_BYTES_PER_S
        assert plan.elapsed_s < 1.6 * plan.expected_s
    (plan,) = found["broadcast"].plans
    assert plan.estimates[0][2] == pytest.approx(plan.expected_s)
    assert sum(plan.shares.values()) == pytest.approx(1)
    text = str(found["broadcast"])
    assert f"broadcast of 8.0 MiB from {own[0]} to " in text
    assert "compared: stripes (3) " in text
