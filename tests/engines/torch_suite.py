"""One rank of torch's own tests of torch.distributed, with the backend "hoplite".

Those tests start processes of their own and compare the backend's name with those that torch knows.
Here the ranks are members of `Cluster.spmd`, which make one test after the other, each with a new
process group. The tests are taken for Gloo's, because a Gloo test is one for CPUs.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any

TEST_S = 60.0  # for one call of a test, in torch's own measure: its process group's timeout


def load(size: int, folder: str) -> Any:
    """torch's module of tests. It reads the environment when it is imported."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=folder)
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed import distributed_test

    # Tests of subgroups are for 8 ranks or for MPI, which they ask the environment when they run.
    os.environ["BACKEND"] = "mpi"
    return distributed_test


def names() -> list[str]:
    """All tests of DistributedTest._DistTestBase, in the order in which they are written."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        base = load(4, folder).DistributedTest._DistTestBase
    return [name for name in vars(base) if name.startswith("test_")]


def rank_of(rank: int, size: int, folder: str, port: int, chosen: list[str]) -> dict[str, str]:
    """The body of one rank: what became of each test on the rank where it fared worst, as ""
    (passed), "skipped: ..." or a traceback. `port`: one that nobody uses."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    import hoplite_mp.integrations.torch

    module = load(size, folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    for name in ("barrier", "test_dir"):
        Path(folder, name).mkdir(exist_ok=True)

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        pass

    found: dict[str, str] = {}
    with hoplite_mp.current().group("torch suite", size, rank) as together:
        for number, name in enumerate(chosen):
            module.Barrier.barrier_id = 0
            if rank == 0:
                module.Barrier.init()
            together.barrier()
            begun = time.monotonic()
            case = Case(name)
            case.rank, case.file_name = rank, f"{folder}/store{number}"
            dist.init_process_group(
                "hoplite",
                init_method=case.init_method,
                world_size=size,
                rank=rank,
                timeout=datetime.timedelta(seconds=TEST_S),
            )
            common_utils.set_rng_seed(1234)
            # These ask which tensors the backend takes; no others give its name to torch.
            module.BACKEND = "gloo" if "gradients_no_sync" in name else "hoplite"
            outcome = _outcome(case, name, module.TEST_SKIPS)
            if not outcome:
                together.barrier()  # others may still need this rank's process group
            if dist.is_initialized():
                dist.destroy_process_group()
            if outcome:
                together.barrier()
            outcomes = together.allgather(outcome)
            found[name] = max(outcomes, key=lambda text: (bool(text), not _skipped(text)))
            if rank == 0 and (took := time.monotonic() - begun) > 5:
                print(f"{name} took {took:.0f} s", flush=True)
    return found


def _skipped(text: str) -> bool:
    return text.startswith("skipped: ")


def _outcome(case: Any, name: str, skips: dict[str, Any]) -> str:
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as ended:
        reasons = {skip.exit_code: skip.message for skip in skips.values()}
        if ended.code in reasons:
            return f"skipped: {reasons[ended.code]}"
        return f"the test has ended the process with {ended.code}" if ended.code else ""
    except BaseException:
        return traceback.format_exc()
    return ""
