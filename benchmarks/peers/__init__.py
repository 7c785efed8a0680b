"""Other ways to run functions in processes, behind one interface."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from benchmarks.peers.joblib_parallel import JoblibParallel
from benchmarks.peers.loky_executor import LokyExecutor
from benchmarks.peers.process_pool import ForkPool, SpawnPool

if TYPE_CHECKING:
    from benchmarks.peers.base import Peer

# ForkPool first: it must fork before anything else in this process has started threads.
ALL: list[type[Peer]] = [ForkPool, SpawnPool, LokyExecutor, JoblibParallel]


def installed() -> list[type[Peer]]:
    """Those that can run here."""
    return [kind for kind in ALL if importlib.util.find_spec(kind.module) is not None]
