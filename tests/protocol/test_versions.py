"""Which software may work together, and the table that says why not."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest

from hoplite_mp import __version__
from hoplite_mp._protocol.greetings import compare_versions, software_versions

HERE = {"python": "3.11.7", "hoplite_mp": "0.1.0", "numpy": "2.4.6", "byte order": "little"}


@pytest.mark.parametrize(
    "change", [{}, {"python": "3.11.0"}, {"numpy": "2.4.0rc1"}, {"hoplite_mp": "0.1.9"}]
)
def test_versions_with_different_patches_match(change: dict[str, str]) -> None:
    assert compare_versions(HERE, HERE | change) is None


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"python": "3.12.7"}, "  python  3.11.7  3.12.7"),
        ({"numpy": "1.4.6"}, "  numpy  2.4.6  1.4.6"),
        ({"byte order": "big"}, "  byte order  little  big"),
        ({"numpy": "-"}, "  numpy  2.4.6  -"),
        ({"new": "1.0"}, "  new  -     1.0"),
    ],
)
def test_versions_that_differ_are_listed(change: dict[str, str], row: str) -> None:
    table = compare_versions(HERE, HERE | change)
    assert table is not None
    head, *rows = table.splitlines()
    assert head.split() == ["here", "there"]
    assert [line.split() for line in rows] == [row.split()]
    column = head.index("there")
    assert all(line[column - 1] == " " and line[column] != " " for line in rows)


def test_version_missing_on_one_side_differs() -> None:
    assert "numpy" in str(compare_versions(HERE, {k: HERE[k] for k in HERE if k != "numpy"}))


def test_versions_of_this_process_are_reported() -> None:
    found = software_versions()
    assert found["python"] == sys.version.split()[0]
    assert found["numpy"] == np.__version__
    assert found["cloudpickle"] == cloudpickle.__version__
    assert found["hoplite_mp"] == __version__
    assert compare_versions(found, found) is None


def test_versions_of_unimported_packages_are_read_from_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "cloudpickle")
    assert software_versions()["cloudpickle"] == cloudpickle.__version__
