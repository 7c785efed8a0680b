"""Source text of functions by value on a host that lacks their file."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.support.lan_programs import WAIT_FOR_ALL
from tests.support.notebook_cells import CELLS, EXPECTED_OF_CELLS

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster


def test_source_of_cell_on_another_host_is_shown(cluster: UpCluster, lan: Lan) -> None:
    text = textwrap.dedent(CELLS) + "tell(c.options(node=there))\n"
    assert cluster.run(lan[0], WAIT_FOR_ALL + text).splitlines() == EXPECTED_OF_CELLS
