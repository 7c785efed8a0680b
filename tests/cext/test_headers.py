"""Numbers of header states, kinds, flags and slots in Python are those of the C header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hoplite_mp._common import object_states
from hoplite_mp._supervisor.main import FIRST_SLOT

LAYOUT = Path(__file__).resolve().parent.parent.parent / "cext" / "shm_layout.h"


def enum(name: str) -> dict[str, int]:
    """Members of one enum of the C header."""
    text = re.sub(r"/\*.*?\*/", "", LAYOUT.read_text(), flags=re.DOTALL)
    body = re.search(rf"enum {name} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None, f"{LAYOUT.name} has no enum {name}"
    found = re.findall(r"(\w+) = (\d+)", body[1])
    assert len(found) == len([one for one in body[1].split(",") if one.strip()])
    return {member: int(number) for member, number in found}


def named(prefix: str) -> dict[str, int]:
    """Constants of the Python module."""
    return {name: value for name, value in vars(object_states).items() if name.startswith(prefix)}


def test_states_are_those_of_the_c_header() -> None:
    assert {f"ST_{name}": number for name, number in object_states.STATE.items()} == enum(
        "shm_state"
    )


@pytest.mark.parametrize(
    ("prefix", "name", "all_of_them"),
    [("KIND_", "shm_kind", True), ("FLAG_", "shm_flag", False), ("CLIENT_", "client_kind", False)],
)
def test_kinds_and_flags_are_those_of_the_c_header(
    prefix: str, name: str, all_of_them: bool
) -> None:
    ours, theirs = named(prefix), enum(name)
    assert ours
    assert ours.items() <= theirs.items()
    assert not all_of_them or ours == theirs


def test_slots_are_those_of_the_c_header_and_of_the_supervisor() -> None:
    assert re.search(rf"\bNODE_SLOT = {object_states.NODE_SLOT},", LAYOUT.read_text())
    assert re.search(rf"\bCLIENTS = {object_states.SLOTS_MAX},", LAYOUT.read_text())
    assert object_states.FIRST_SLOT == FIRST_SLOT  # the template process imports nothing compiled


def test_every_state_is_pending_or_stored_or_has_been_dropped() -> None:
    parts = [object_states.PENDING, object_states.STORED, object_states.DROPPED]
    assert sorted(sum(parts, ())) == sorted(object_states.STATE.values())
