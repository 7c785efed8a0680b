"""Programs with more data than a store can hold: spilled, read again, reduced in chunks.

Stores and disks are small in some runs. Objects that do not fit are spilled or refused, or read
from the spill file. These programs hold their values, so that other values do not fit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.values import Leaf, WrongBytes, make_once_more
from hoplite_mp._simulation.workloads.programs import BYTES_MAX, HANGS_S
from hoplite_mp.errors import ClosedError, StoreFullError

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_store_pressure"]

VALUES_MIN, VALUES_MAX = 6, 14
ITEMS = 40_000, 100_000  # of 8 bytes each; seven of the longer arrays fill a store of 6 MiB


def begin_store_pressure(work: Programs) -> None:
    """Starts a program that puts many values, reads some of them repeatedly, and may sum them.
    Another program may read them, too. Does nothing unless stores are small."""
    hosts, rng = work.hosts(), work.rng
    if not hosts or not work.oracle.small_stores:
        return
    salt, items = work.salt(), rng.choice(ITEMS)
    leaves = [Leaf(salt, index, items) for index in range(rng.randint(VALUES_MIN, VALUES_MAX))]
    reads = [rng.randrange(len(leaves)) for _ in range(2 * len(leaves))]
    held = rng.randint(0, len(leaves))
    sums = rng.random() < 0.6
    name = f"full {salt}"
    read_remotely = rng.random() < 0.5
    work.program(rng.choice(hosts), name,
                 partial(_fill, work, leaves, reads, held, sums, name, read_remotely))  # fmt: skip
    if read_remotely:
        work.program(rng.choice(hosts), f"reader of {name}", partial(_read, work, leaves, name))


def _fill(
    work: Programs,
    leaves: list[Leaf],
    reads: list[int],
    held: int,
    sums: bool,
    name: str,
    read_remotely: bool,
    c: Cluster,
) -> None:
    refs: list[Any] = []
    views: list[Any] = []  # arrays that pin the values that were read
    host = work.world.host_of(work.world.processes.running)
    assert host is not None
    here = c.options(node=f"h{host.number}")
    result = here.submit(make_once_more, leaves[0], 0.0)
    c.wait([result], timeout=HANGS_S)
    try:
        for leaf in leaves:
            try:
                refs.append(c.put(leaf.array()))
            except StoreFullError as error:
                work.oracle.check_error(name, error)
                break
        for index in reads:
            if index < len(refs):
                value = _value(work, c, refs[index], name)
                if value is None:
                    break  # the value did not fit in time, and neither would the next
                work.oracle.check_leaf(leaves[index], value)
                views = [*views, value][-held:] if held else []
    finally:
        for index, ref in enumerate(refs):
            work.board.publish(f"{name}: {index}", ref._id)
        for index in range(len(refs), len(leaves)):
            work.board.publish(f"{name}: {index}", None)
    if sums and refs:
        views.clear()
        _add_up(work, leaves[: len(refs)], refs, name, c)
    if read_remotely:
        work.board.find(f"{name} is not needed", HANGS_S)
    # A ready result can be read after the end of the cluster, as in hoplite_mp/_api/shutdown.py.
    c._runtime.submitter.keep_results(BYTES_MAX)
    c._runtime.close()
    c._runtime.submitter.call_back_at_end()
    try:
        work.oracle.check_leaf(leaves[0], result.result(timeout=HANGS_S))
    except ClosedError:  # the value was spilled, and its node has ended
        if host.place not in work.world.struck:
            raise


def _value(work: Programs, c: Cluster, ref: Any, name: str) -> Any:
    try:
        return work.value(c, ref, name)
    except StoreFullError as error:
        work.oracle.check_error(name, error)
        return None


def _add_up(work: Programs, leaves: list[Leaf], refs: list[Any], name: str, c: Cluster) -> None:
    """Sums all values, and checks that the sum contains each of them."""
    total = c.reduce(refs)
    value = np.asarray(work.value(c, total, f"the sum of {name}"))
    whole = sum((leaf.array() for leaf in leaves[1:]), start=leaves[0].array())
    if sorted(total.contributors or ()) != list(range(len(leaves))) or (value != whole).any():
        raise WrongBytes(f"the sum of {name}: {value[:4]}, contributors {total.contributors}")
    work.oracle.reads += 1


def _read(work: Programs, leaves: list[Leaf], name: str, c: Cluster) -> None:
    try:
        for index, leaf in enumerate(leaves):
            ref = work.ref(c, f"{name}: {index}")
            if ref is None:
                break  # the value did not fit, and neither did later ones
            value = _value(work, c, ref, f"reader of {name}")
            if value is None:
                break  # the value did not fit in time, and neither would the next
            work.oracle.check_leaf(leaf, value)
    finally:
        work.board.publish(f"{name} is not needed", None)
