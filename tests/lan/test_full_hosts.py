"""Hosts all of whose memory is in use, while other hosts need what is on their disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(2) as made:
        yield made


def test_what_is_on_the_disk_of_a_full_host_is_read_when_there_is_room(lan: Lan) -> None:
    """The reader is told that the owner is full, not that the object is lost; and can read it as
    soon as the owner's process lets go of its arrays."""
    cluster = UpCluster(lan, tls=False, memory="64MiB", HOPLITE_MP_PUT_WAIT_S="1")
    out = cluster.run(
        lan[1],
        """
        from hoplite_mp import StoreFullError
        while sum(n.workers for n in c.nodes) < 2:
            time.sleep(0.02)
        there = [n for n in c.nodes if n.id != c.here.id and n.workers][0]
        def read(value):
            return int(value[-1])
        assert c.options(node=there).submit(len, [1]).result() == 1
        ref = c.put(np.full(2 << 20, 7))
        pinned = []
        try:
            while True:
                pinned.append(c.get(c.put(np.zeros(1 << 20))))
        except StoreFullError:
            pass
        begun = time.monotonic()
        try:
            print("read", c.options(node=there).submit(read, ref).result())
        except StoreFullError as error:
            print(c.here.id in str(error), time.monotonic() - begun < 30)
        del pinned
        while True:  # a read waits for space for less time than a busy machine may need
            try:
                print(c.options(node=there).submit(read, ref).result())
                break
            except StoreFullError:
                assert time.monotonic() - begun < 60
        """,
    )
    assert out.split() == ["True", "True", "7"]
    cluster.end()
