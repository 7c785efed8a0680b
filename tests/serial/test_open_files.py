"""Open files stay where they are: what is passed in their place would be something else."""

from __future__ import annotations

import copyreg
import gzip
import io
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _serialize
from tests.support.payloads import function_trip, round_trip
from tests.support.processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAYS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.open(),
    "text to write": lambda path: path.open("a"),
    "text to read and write": lambda path: path.open("r+"),
    "closed": lambda path: _closed(path.open()),
    "binary": lambda path: path.open("rb"),
    "binary to write": lambda path: path.open("ab"),
    "binary to read and write": lambda path: path.open("r+b"),
    "raw": lambda path: path.open("rb", buffering=0),
    "temporary": lambda path: tempfile.NamedTemporaryFile("w+", dir=path.parent),  # noqa: SIM115
}

PLACES: dict[str, Callable[[Any], Any]] = {
    "argument": lambda file: _serialize.encode_call((1, file), {}),
    "keyword": lambda file: _serialize.encode_call((), {"given": file}),
    "inside": lambda file: _serialize.encode_call(({"deep": [file]},), {}),
    "put": _serialize.encode,
    "put inside": lambda file: _serialize.encode([file]),
    "closure": lambda file: _serialize.encode_function(lambda: file),
    "default": lambda file: _serialize.encode_function(lambda given=file: given),
    "bound method": lambda file: _serialize.encode_function(Reader(file).read),
}


class Reader:
    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self) -> Any:
        return self.file.read()


class Reopened(io.FileIO):
    """Says itself how it travels."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Reopened, (self.name,)


def _closed(file: Any) -> Any:
    file.close()
    return file


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_an_open_file_is_refused_with_its_name(tmp_path: Path, way: str, place: str) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\n")
    file = WAYS[way](path)
    with (
        file if not file.closed else io.StringIO(),
        pytest.raises(TypeError, match=r"is an open file.*pass its path") as caught,
    ):
        PLACES[place](file)
    assert repr(file.name) in str(caught.value)
    assert path.read_text() == "one\ntwo\n"


def test_a_global_of_the_main_script() -> None:
    said = run_python("""
        from hoplite_mp import _serialize as serial
        source = open("/dev/null")
        def read():
            return source.read()
        try:
            serial.encode_function(read)
        except TypeError as error:
            print(error)
    """)
    assert said.startswith("cannot pickle the function read: '/dev/null' is an open file")


def test_the_text_of_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"one\n"))
    with gzip.open(path, "rt") as file, pytest.raises(TypeError, match=r"lines\.gz.*open file"):
        _serialize.encode(file)


def test_files_without_a_name() -> None:
    ends = os.pipe()
    for end, mode in zip(ends, "rw", strict=True):
        with open(end, mode) as file, pytest.raises(TypeError, match=f"{end} is an open file"):
            _serialize.encode(file)
    with pytest.raises(TypeError, match="without a name is an open file"):
        _serialize.encode(io.TextIOWrapper(io.BytesIO(b"text")))


def test_what_travels_goes_on_to_do_so(tmp_path: Path) -> None:
    assert round_trip([io.StringIO("text")])[0].read() == "text"
    assert round_trip([io.BytesIO(b"data")])[0].read() == b"data"
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        assert round_trip([stream])[0] is stream
        assert function_trip(lambda out=stream: out)() is stream
    path = tmp_path / "data"
    path.write_bytes(b"data")
    with Reopened(path) as file, round_trip([file])[0] as again:
        assert again.read() == b"data"


def test_a_registered_way_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(io.FileIO):
        pass

    monkeypatch.setitem(copyreg.dispatch_table, Own, lambda file: (str, (file.name,)))
    path = tmp_path / "data"
    path.touch()
    with Own(str(path)) as file:
        assert round_trip([file])[0] == str(path)
