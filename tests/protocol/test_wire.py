"""The bytes of messages do not change, whatever their classes are called.

`python -m tests.protocol.test_wire` records the bytes anew, after a change of the protocol.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from hoplite_mp._protocol.codec import encode
from hoplite_mp._protocol.greetings import encode_frame
from tests.support.messages import GREETINGS, SAMPLES, TERMS_TO_MANAGER, TERMS_TO_NODE
from tests.support.peer_messages import PEER_SAMPLES

HERE = Path(__file__).resolve().parent
RECORD = HERE / "wire.txt"
PACKAGE = HERE.parents[1] / "hoplite_mp"


def frames() -> list[str]:
    """One line for each sample: its tag, and its frame in hexadecimal digits."""
    messages: list[Any] = [*SAMPLES, *TERMS_TO_NODE, *TERMS_TO_MANAGER, *PEER_SAMPLES]
    encoded = [(one, encode(one)) for one in messages]
    encoded += [(one, encode_frame(one)) for one in GREETINGS]
    return [f"{one.__struct_config__.tag} {frame.hex()}" for one, frame in encoded]


def test_messages_encoded_are_the_recorded_bytes() -> None:
    assert frames() == RECORD.read_text().splitlines()


def test_tags_of_all_messages_are_explicit() -> None:
    """A tag that msgspec takes from the class's name would change when the class is renamed."""
    named = {
        str(path.relative_to(PACKAGE)): re.findall(r"\btag=(?!\")\w+", path.read_text())
        for path in (PACKAGE / "_protocol").rglob("*.py")
    }
    assert {path: found for path, found in named.items() if found} == {}


if __name__ == "__main__":
    RECORD.write_text("\n".join(frames()) + "\n")
    sys.exit(0)
