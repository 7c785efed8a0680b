"""The node's folders stand on one another: an import leads to the same folder or to one below it.

What is imported for type checking alone counts, because a reader has to know it all the same.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

NODE = Path(__file__).parent.parent / "hoplite_mp" / "_node"
# From below. The first floor is the files of the node's folder itself.
FLOORS = (
    *("", "io", "store", "objects", "peers", "output", "tasks", "lineage", "actors"),
    *("execution", "collectives", "groups", "diagnostics", "manager_link", "runtime"),
)


def folders_in(text: str) -> set[str]:
    """Folders of the node from which this file imports."""
    found = set()
    for one in ast.walk(ast.parse(text)):
        if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("hoplite_mp._node"):
            parts = (one.module or "").split(".")[2:]
            found |= {parts[0]} if len(parts) > 1 or (parts and parts[0] in FLOORS) else {""}
    return found


@pytest.mark.parametrize("folder", FLOORS)
def test_arrows_point_down(folder: str) -> None:
    above = set(FLOORS[FLOORS.index(folder) + 1 :])
    files = sorted((NODE / folder).glob("*.py"))
    assert files
    for path in files:
        assert not (met := folders_in(path.read_text()) & above), f"{path.name} imports from {met}"


def test_every_folder_has_a_floor() -> None:
    folders = {path.parent.relative_to(NODE).as_posix() for path in NODE.rglob("*.py")}
    assert folders - {"."} == set(FLOORS) - {""}


def test_what_it_reads() -> None:
    text = "from hoplite_mp._node import trace_events\nfrom hoplite_mp._node.tasks import hints\n"
    assert folders_in(text) == {"", "tasks"}
    text = "if TYPE_CHECKING:\n    from hoplite_mp._node.runtime.cluster_node import ClusterNode\n"
    assert folders_in(text) == {"runtime"}
