"""All the calls that hands make; importing this lists them."""

from tests.campaign import (
    actor_calls,
    collective_calls,
    group_calls,
    object_calls,
    pool_calls,
    task_calls,
)

__all__ = [
    "actor_calls",
    "collective_calls",
    "group_calls",
    "object_calls",
    "pool_calls",
    "task_calls",
]
