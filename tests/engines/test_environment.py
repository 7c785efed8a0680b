"""These tests are about the package of this checkout, not about one that is installed."""

from pathlib import Path

import hoplite_mp

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_package_is_the_one_of_this_checkout() -> None:
    assert Path(hoplite_mp.__file__).parent == ROOT / "hoplite_mp"
