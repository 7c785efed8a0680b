"""Workers' output: lines out of bytes, and how long one waits for a driver."""

from __future__ import annotations

import select

from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._node.output.output import LineSplitter, Subscriber
from hoplite_mp._protocol import output as words
from hoplite_mp._protocol.output import MARK_BYTES, bytes_of, mark
from tests.support.node_ports import split_in_pieces

HOST_ID, ANNA, BERT = 0x1234_5678_9ABC_DEF0, 0x0A0A_0A0A_0A0A_0A0A, (1 << 64) - 1

# -- lines out of bytes ------------------------------------------------------------------------

TEXTS = st.lists(
    st.one_of(
        st.sampled_from([0, ANNA, BERT]),
        st.binary(max_size=30),
        st.sampled_from(
            [b"\n", b"\0hoplite_mp ", mark(HOST_ID + 1, ANNA), words.mark_head(HOST_ID)]
        ),
    ),
    max_size=30,
)


def told(text: list[int | bytes]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else mark(HOST_ID, part) for part in text)


def said(text: list[int | bytes]) -> list[tuple[int, bytes]]:
    """(output owner, line), by what the marks mean."""
    found, output_owner, rest = [], 0, b""
    for part in text:
        if isinstance(part, bytes):
            *lines, rest = (rest + part).split(b"\n")
            found += [(output_owner, line) for line in lines]
        else:
            found += [(output_owner, rest)] if rest else []
            output_owner, rest = part, b""
    return found + ([(output_owner, rest)] if rest else [])


@given(TEXTS, st.lists(st.integers(0, 1000), max_size=10))
def test_lines_reach_their_owner_for_any_read_boundaries(
    text: list[int | bytes], cuts: list[int]
) -> None:
    assert split_in_pieces(LineSplitter(HOST_ID, 10_000), told(text), cuts) == said(text)


@given(TEXTS, st.lists(st.integers(0, 1000), max_size=10))
def test_long_lines_are_split_without_loss(text: list[int | bytes], cuts: list[int]) -> None:
    lines = LineSplitter(HOST_ID, 7)
    found = split_in_pieces(lines, told(text), cuts)
    assert all(len(line) <= 7 for _, line in found)
    joined: dict[int, bytes] = {}
    for to, line in found:
        joined[to] = joined.get(to, b"") + line
    wanted: dict[int, bytes] = {}
    for to, line in said(text):
        wanted[to] = wanted.get(to, b"") + line
    assert joined == wanted


def test_buffered_part_of_a_line_is_bounded() -> None:
    lines = LineSplitter(HOST_ID, 1000)
    count = 0
    for _ in range(100):
        count += sum(len(line) for _, run in lines.feed(b"x" * 997) for line in run)
        assert len(lines.rest) < 1000 + MARK_BYTES
    assert count + len(lines.rest) == 99_700


def test_owner_mark_fits_into_one_atomic_write() -> None:
    assert len(mark(HOST_ID, BERT)) == MARK_BYTES + 1 <= select.PIPE_BUF


# -- how long one waits for a driver -----------------------------------------------------------


class Listener:
    """A driver that takes what it is told to."""

    def __init__(self, patience_s: float | None) -> None:
        self.lines: list[tuple[int, int, bytes]] = []
        self.subscriber = Subscriber(self.deliver, 1000, patience_s)

    def deliver(self, slot: int, stream: int, lines: list[bytes]) -> None:
        self.lines += [(slot, stream, line) for line in lines]


def test_slow_driver_that_reads_is_awaited() -> None:
    one = Listener(5.0)
    assert one.subscriber.offer(2, 1, [b"a" * 3000], 0.0)
    assert not one.subscriber.offer(2, 1, [b"b"], 0.0)
    now = 0.0
    while one.subscriber.waiting > 600:
        now += 4.9
        assert not one.subscriber.give_up(now)
        assert not one.subscriber.taken(100, now)
    assert now > 100.0
    assert one.subscriber.due() == now + 5.0
    assert one.subscriber.taken(200, now)
    assert one.subscriber.due() is None
    assert one.subscriber.offer(2, 1, [b"b"], now)
    assert one.lines[-1] == (2, 1, b"b")


def test_dropped_lines_are_counted_for_each_stream() -> None:
    one = Listener(5.0)
    assert one.subscriber.offer(2, 1, [b"a" * 1000], 0.0)
    assert not one.subscriber.offer(2, 1, [b"b"], 1.0)
    assert one.subscriber.due() == 6.0
    assert not one.subscriber.give_up(5.9)
    assert one.subscriber.give_up(6.0)
    assert one.subscriber.offer(2, 1, [b"b", b"c"], 6.1)
    assert one.subscriber.offer(3, 2, [b"d"], 6.2)
    assert one.subscriber.offer(2, 1, [b"e"], 6.3)
    assert one.subscriber.taken(1016, 7.0)
    assert [(slot, stream) for slot, stream, _ in one.lines[1:]] == [(2, 1), (3, 2)]
    assert one.lines[1][2].startswith(b"3 lines were dropped here: no line was read for 5 s")
    assert one.lines[2][2].startswith(b"1 line was dropped")
    assert one.subscriber.waiting == bytes_of([line for _, _, line in one.lines[1:]])
    assert one.subscriber.offer(2, 1, [b"f"], 7.1)
    assert one.lines[-1] == (2, 1, b"f")


def test_subscriber_without_other_hosts_waits_indefinitely() -> None:
    one = Listener(None)
    assert one.subscriber.offer(2, 1, [b"a" * 1000], 0.0)
    assert not one.subscriber.offer(2, 1, [b"b"], 0.0)
    assert one.subscriber.due() is None
    assert not one.subscriber.give_up(1e9)
