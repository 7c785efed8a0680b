"""Ids: what is packed comes out again, and the layout is the documented one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._common import ids

U16 = st.integers(0, (1 << 16) - 1)
U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)


@given(U16, U16, U32)
def test_local_id_round_trip(table: int, index: int, generation: int) -> None:
    local = ids.pack_local(table, index, generation)
    assert 0 <= local < 1 << 64
    assert ids.unpack_local(local) == (table, index, generation)


@given(U64, U64)
def test_public_id_round_trip(host: int, local: int) -> None:
    public = ids.pack_id(host, local)
    assert len(public) == ids.ID_BYTES
    assert ids.unpack_id(public) == (host, local)
    assert bytes.fromhex(ids.format_id(public)) == public


def test_layout_is_table_index_generation_in_little_endian() -> None:
    local = ids.pack_local(0x0102, 0x0304, 0x05060708)
    assert local == 0x0102030405060708
    public = ids.pack_id(0x1112131415161718, local)
    assert ids.format_id(public) == "18171615141312110807060504030201"


@pytest.mark.parametrize(
    ("table", "index", "generation"),
    [(1 << 16, 0, 0), (0, 1 << 16, 0), (0, 0, 1 << 32), (-1, 0, 0)],
)
def test_a_field_that_does_not_fit_is_refused(table: int, index: int, generation: int) -> None:
    with pytest.raises(ValueError, match="must fit"):
        ids.pack_local(table, index, generation)


def test_wide_ids_and_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="host id must fit into 64 bits"):
        ids.pack_id(1 << 64, 0)
    with pytest.raises(ValueError, match="local id must fit into 64 bits"):
        ids.unpack_local(1 << 64)
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        ids.unpack_id(bytes(15))
    with pytest.raises(ValueError, match="16 bytes, not 17"):
        ids.format_id(bytes(17))


def test_host_ids_are_random_and_never_zero() -> None:
    some = {ids.random_host_id() for _ in range(100)}
    assert len(some) == 100
    assert all(0 < host < 1 << 64 for host in some)
