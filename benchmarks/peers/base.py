"""The interface of a peer."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Peer(abc.ABC):
    """A started pool of workers."""

    name: ClassVar[str]
    module: ClassVar[str]
    """Must be installed for this peer."""

    @abc.abstractmethod
    def __init__(self, workers: int) -> None: ...

    @abc.abstractmethod
    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run one task and wait for its result."""

    @abc.abstractmethod
    def queue(self, fn: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        """Hand over one task for each item, then wait for all results."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers."""
