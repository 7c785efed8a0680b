"""What several tests of programs on pages and of examples use."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.lan import forked

if TYPE_CHECKING:
    from collections.abc import Iterator

LEARNING = (
    "sklearn.decomposition", "sklearn.metrics", "sklearn.model_selection", "sklearn.svm",
    "hoplite_mp.integrations.joblib", "hoplite_mp.ml._group_by_parts", "hoplite_mp.ml._tree_tasks",
)  # fmt: skip


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    """Programs and workers find what many of them would import for seconds."""
    with forked.programs(*(LEARNING if importlib.util.find_spec("sklearn") else ())):
        yield
