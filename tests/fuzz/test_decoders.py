"""No decoder lets out anything but its documented errors, or takes memory without a reason."""

from __future__ import annotations

import ast
import tracemalloc
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hoplite_mp._protocol.peers import PeerMessage
from tests.fuzz.mutating import near
from tests.fuzz.targets import SOURCES, TARGETS, Target
from tests.support.peer_messages import PEER_SAMPLES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, EXAMPLES_SOAK = 20, 3_000
# A number of one byte becomes a tuple of one, with its place in another one: 56 bytes and more.
MEMORY_FACTOR = 120
MEMORY_EXTRA_BYTES = 256 << 10  # caches, messages of errors
# Calls that make something of bytes.
DECODES = {"Decoder", "decode", "loads", "unpack", "unpack_from", "iter_unpack", "from_bytes"}
DECODES |= {"unpack_head", "unpack_buffer", "frombuffer"}


def attempt(target: Target, data: bytes) -> None:
    """Within its errors and memory."""
    tracemalloc.start()
    try:
        target.run(data)
    except target.errors:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= MEMORY_FACTOR * len(data) + MEMORY_EXTRA_BYTES, f"{peak} bytes of {len(data)}"


def fuzz(target: Target, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(near(target.samples, target.packed))
    def run(data: bytes) -> None:
        attempt(target, data)

    run()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_near_misses_and_noise(target: Target) -> None:
    fuzz(target, EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_many_near_misses(target: Target) -> None:
    fuzz(target, EXAMPLES_SOAK)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_cut_of_the_samples(target: Target) -> None:
    for sample in target.samples:
        for end in range(0, len(sample), max(1, len(sample) // 24)):
            attempt(target, sample[:end])


def test_the_samples_are_legal() -> None:
    """Else nothing near them is."""
    for target in TARGETS:
        legal = 0
        for sample in target.samples:
            try:
                target.run(sample)
                legal += 1
            except target.errors:
                if not target.name.startswith("from "):  # those are of all directions
                    raise
        assert legal * 4 >= len(target.samples), target.name


def test_there_is_a_sample_of_every_message_between_nodes() -> None:
    assert {type(message) for message in PEER_SAMPLES} == set(get_args(PeerMessage))


def test_every_module_that_decodes_is_named() -> None:
    found = set()
    for path in (ROOT / "hoplite_mp").rglob("*.py"):
        tree = ast.parse(path.read_text())
        if any(map(_decodes, ast.walk(tree))):
            found.add(str(path.relative_to(ROOT / "hoplite_mp")))
    assert found <= set(SOURCES), "name them in tests/fuzz/targets.py"
    named = {name for text in SOURCES.values() for name in text.split("; ")}
    assert named >= {target.name for target in TARGETS}


def _decodes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name == "decode":  # of bytes it makes text, which cannot be wrong with errors=
        return bool(node.args) and not isinstance(node.args[0], ast.Constant)
    return name in DECODES


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_it_can_fail(data: st.DataObject) -> None:
    """A decoder that believes a length, and one that lets out what it should not."""
    for run in (lambda _: bytearray(1 << 20), lambda _: [][0]):
        with pytest.raises((AssertionError, IndexError)):
            attempt(Target("bad", run, (), (b"",)), data.draw(st.binary(max_size=8)))
