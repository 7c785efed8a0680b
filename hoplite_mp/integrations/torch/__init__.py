"""torch on a hoplite_mp cluster: a process group, and training that survives deaths.

`dist.init_process_group("hoplite", ...)` works in every process that has a cluster, as a member of
`Cluster.spmd` or through `Cluster(address=...)`, and in ranks on one host without a cluster. If the
package is installed, torch finds the backend without an import of this module. Importing this
module also registers the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "hoplite_mp.integrations.torch needs torch: pip install 'hoplite-mp[torch]'"
    ) from error

from _hoplite_mp_torch import register
from hoplite_mp.integrations.torch._process_group import ProcessGroup

if TYPE_CHECKING:
    from hoplite_mp.integrations.torch._data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel", "ProcessGroup"]

register()


def __getattr__(name: str) -> Any:
    """Imports DistributedDataParallel when it is first used, because the import takes 1.5 s."""
    if name != "DistributedDataParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hoplite_mp.integrations.torch._data_parallel import DistributedDataParallel

    globals()[name] = DistributedDataParallel
    return DistributedDataParallel
