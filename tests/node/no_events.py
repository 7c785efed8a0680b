"""Events of a component that is tested alone: nobody handles them."""

from __future__ import annotations

from typing import Any

__all__ = ["NobodyAbove"]


class NobodyAbove:
    """Answers as a node does in which nothing else goes on; tests replace what they need."""

    # What is only heard.
    def delay(self, oid: int) -> None: ...
    def fail_delayed(self, pool: int) -> None: ...
    def pool_deserted(self, pool: int, why: str) -> None: ...
    def remote_workers_lost(self, pool: int) -> None: ...
    def sends_on(self, output_owner: int, host_id: int) -> None: ...
    def ends_elsewhere(self, oid: int) -> None: ...
    def was_full(self, oid: int, host_id: int) -> None: ...
    def refuse_calls(self, pool: int) -> None: ...
    def arrived(self, pool: int) -> None: ...
    def task_ends(self, slot: int) -> None: ...
    def admitted(self, oid: int, task: bytes, demand: Any) -> None: ...
    def dropped(self, task: bytes) -> None: ...
    def make_room(self) -> None: ...
    def freed(self, oid: int) -> None: ...
    def nobody_named(self, oid: int) -> None: ...
    def result_held(self, oid: int) -> None: ...
    def moved(self, one: Any) -> None: ...
    def ownerless(self, one: Any) -> None: ...
    def all_heard(self) -> None: ...

    # What is asked.
    def lost_call(self, oid: int, name: str, number: int) -> Exception | None:
        return None

    def lost_actor_call(self, worker: Any, how: str) -> Exception | None:
        return None

    def is_remote_actor(self, pool: int) -> bool:
        return False

    def demand_of(self, oid: int) -> Any:
        return ()

    def target_of(self, oid: int) -> bytes:
        return b""

    def is_actor(self, pool: int) -> bool:
        return False

    def is_round(self, pool: int) -> bool:
        return False

    def admit(self, peer: int, task: bytes, demand: Any, needed: bool) -> bool:
        return False

    def restore_elsewhere(self, oid: int) -> bool | None:
        return False

    def is_inbound(self, oid: int) -> bool:
        return False

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        return None

    def ask_for_owner(self, one: Any) -> bool:
        return False

    def remote_subscriber(self, output_owner: int) -> Any:
        return None

    def runs_again(self, oid: int) -> bool:
        return False

    def extra_holds(self, oid: int) -> int:
        return 0

    def public(self, oid: int) -> bytes:
        return b""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        return None
