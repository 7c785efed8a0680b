"""The entry point `torch.backends`: torch calls `register` whenever it is imported.

So `dist.init_process_group("hoplite")` needs no import of hoplite_mp. `register` starts nothing and
never raises: an exception would make every `import torch` of this environment fail. This module is
outside the package, because importing the package warns or raises on builds of Python without a
GIL. It imports the package when the backend is used.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "hoplite"
_log = logging.getLogger("hoplite_mp")


def register() -> None:
    """Registers the backend with torch.distributed, unless that is done or torch has none."""
    try:
        import torch.distributed as dist

        if dist.is_available() and BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    except Exception:
        _log.debug("the backend %r was not registered with torch", BACKEND, exc_info=True)


def _create(*about: Any) -> Any:
    """Makes a process group; imports the backend only now."""
    from hoplite_mp.integrations.torch._process_group import create

    return create(*about)
