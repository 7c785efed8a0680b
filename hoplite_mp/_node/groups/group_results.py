"""Contributions to a Group's calls and their results on one host.

Messages about a call only describe large arrays, whose bytes stay in the node's store. The result
of a call becomes one object that all members on this host read. The node holds this object until
all members here have begun the next call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.call_mismatch import ROOTED, different_calls
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._node.groups.call_state import Prepared
from hoplite_mp._node.groups.group_decisions import combine
from hoplite_mp._node.groups.repeated_plans import member_of
from hoplite_mp._node.objects.remote_objects import payload_layout
from hoplite_mp._node.store.budget import PROMISED
from hoplite_mp._node.store.growing_block import BLOCK, GrowingBlock
from hoplite_mp._protocol.fields import FOLDING, shorten
from hoplite_mp._protocol.group_calls import GroupPart, Piece, error_kind, too_large
from hoplite_mp._protocol.messages import Distribute
from hoplite_mp._serialize.contributions import (
    PREFIXES,
    TARGETED,
    mask_of,
    shortened,
)
from hoplite_mp.errors import StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.store.budget import Store
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupCommit, Plan
    from hoplite_mp._protocol.local import GroupCall
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = ["GroupResults", "free_if_returned", "keep_promise", "promise"]

# The engine may commit a call before this process handles the engine's event (`engine_commit.py`),
# and the member may return a block of the result immediately. The engine still uses the block until
# this process has handled the event, so the block is freed only then.


def promise(store: Store, payload: int) -> bool:
    """Reserves a block of this node until `keep_promise`. Returns False if it is already
    reserved."""
    if store.leases.get(payload) != NODE_SLOT:
        return False
    store.leases[payload] = PROMISED
    return True


def keep_promise(store: Store, payload: int, slot: int) -> None:
    """Leases a reserved block to the process in the slot, or to this node if that is NODE_SLOT."""
    store.leases[payload] = slot


def free_if_returned(store: Store, payload: int) -> None:
    """Frees a block that its member returned while the block was still reserved."""
    if payload in store.leases and store.client.block_owner(payload) == 0:
        store.free(payload)


_log = logging.getLogger("hoplite_mp")


class GroupResults:
    """Describes members' contributions, and creates the objects that members read as results."""

    def __init__(self, host: HostContext, plan_runner: PlanRunner) -> None:
        self.store = host.store
        self.imports = host.imports
        self.client = host.client
        self.results = host.results
        self.plan_runner = plan_runner
        self.streaming_sources = plan_runner.streaming_sources
        # Rank of a member here -> the blocks of the latest result that the member receives.
        self.given: dict[int, list[int]] = {}
        # Operation -> holds on the refs inside values that have arrived.
        self.inner: dict[int, list[Any]] = {}

    def part(self, members: GroupMembers, call: int, asks: Sequence[GroupCall]) -> GroupPart:
        """The message to the leading node with this node's contributions to a call."""
        first = asks[0]
        mistaken = next((ask for ask in asks if ask.mistake), None)
        mistake, error = ("", "value") if mistaken is None else (mistaken.mistake, mistaken.error)
        if not mistake:
            mistake = different_calls({ask.rank: (ask.kind, ask.op, ask.root) for ask in asks})
        pieces = [] if mistake else [piece for ask in asks for piece in self._pieces(ask)]
        if pieces and (large := too_large(first.kind, pieces)):
            mistake, pieces = f"group {members.name!r}: {large}", []
        return GroupPart(
            members.generation,
            members.version,
            call,
            tuple(ask.rank for ask in asks),
            first.kind,
            first.op,
            first.root,
            tuple(pieces),
            mistake,
            error,
        )

    def _pieces(self, ask: GroupCall) -> list[Piece]:
        found = []
        for number, part in enumerate(ask.parts):
            target = number if ask.kind in TARGETED else -1
            if isinstance(part, bytes):
                layout = payload_layout(memoryview(part))
                piece = Piece(ask.rank, target, len(part), part, layout=layout)
            elif isinstance(part, int):
                mem = self._read(part)
                object_id = ids.pack_id(self.client.host_id, part)
                piece = Piece(ask.rank, target, mem.nbytes, None, object_id, payload_layout(mem))
            else:
                payload, nbytes, _ = part
                layout = payload_layout(self.client.memory(payload, nbytes))
                piece = Piece(
                    ask.rank, target, nbytes, None, self.streaming_sources.name(payload), layout
                )
            found.append(piece)
        return found

    def _read(self, oid: int) -> memoryview:
        got = self.client.view(oid)
        assert not isinstance(got, int), "it is pinned"
        return memoryview(got)

    def pin(self, slot: int, ask: GroupCall) -> list[Any]:
        """Holds and pins a member's contributions, so that they are not spilled during the call.
        Raises StoreFullError if the store is full, and ValueError for a block that the member does
        not lease, which a correct client never sends."""
        found: list[Any] = []
        failure: Exception | None = None
        for part in ask.parts:
            try:
                if isinstance(part, int):
                    found += self._pinned(ask.rank, part)
                elif not isinstance(part, bytes):
                    payload, nbytes, written = part
                    found.append(self.streaming_sources.take(slot, payload, nbytes, written))
            except (ValueError, StoreFullError) as error:
                failure = failure or error  # the node still takes over the remaining blocks
        if failure is not None:
            self.unpin(found)
            raise failure
        return found

    def refuse(self, slot: int, ask: GroupCall) -> None:
        """Ignores a call that arrived after its Group was closed. Its blocks are freed once they
        are completely written."""
        for part in ask.parts:
            if isinstance(part, tuple):
                payload, nbytes, written = part
                block = self.streaming_sources.take(slot, payload, nbytes, written)
                self.streaming_sources.let_go(block)

    def _pinned(self, rank: int, oid: int) -> list[Any]:
        hold = self.client.hold(oid)
        got = self.client.view(oid)
        if isinstance(got, int) and self.store.restore(oid):
            got = self.client.view(oid)
        if isinstance(got, int):
            raise StoreFullError(f"rank {rank}: {self.store.full_message()}")
        return [hold, got]

    def unpin(self, holds: list[Any]) -> None:
        """Releases contributions whose call is over or whose member is gone. Empties the list."""
        for hold in holds:
            if isinstance(hold, GrowingBlock):
                self.streaming_sources.let_go(hold)
        holds.clear()

    def abandon(self, holds: Iterable[Any]) -> None:
        """Abandons contributions whose writer has left, perhaps before they were complete."""
        for hold in holds:
            if isinstance(hold, GrowingBlock):
                self.streaming_sources.abandon(hold)

    def has_lent(self, holds: Iterable[Any]) -> bool:
        """Whether these contributions include members' own arrays, which may change after the
        call."""
        return any(not isinstance(hold, GrowingBlock) for hold in holds)

    def is_written(self, holds: Iterable[Any]) -> bool:
        """Whether members have completely written these contributions."""
        return all(hold.whole for hold in holds if isinstance(hold, GrowingBlock))

    def when_written(self, holds: Iterable[list[Any]], action: Callable[[], None]) -> None:
        """Calls `action` once members have completely written these contributions."""
        source = [hold for some in holds for hold in some if isinstance(hold, GrowingBlock)]
        self.streaming_sources.when_whole(source, action)

    # -- the end -------------------------------------------------------------------------------

    def commit(
        self, message: GroupCommit, go: GroupAttempt | None, mine: dict[int, int]
    ) -> tuple[int, list[Any]]:
        """Creates the result of a call. Returns (object that members read, holds on its contents).
        mine: rank -> client slot of the members here."""
        holds: list[Any] = []
        self.given = {}
        return self._made(message, go, mine, self._blocks(message, go, mine, holds), holds)

    def is_begun(self, message: GroupAttempt) -> bool:
        """Whether the blocks for the bytes that this node receives are known."""
        return all(self.plan_runner.is_begun(plan.operation) for plan in message.plans)

    def prepare(self, message: GroupCommit, go: GroupAttempt, mine: dict[int, int]) -> Prepared:
        """Like `commit`, but creates the result before the call is committed. Members own none of
        its blocks until `settle`. mine: as for `commit`, with at most one rank."""
        prepared = Prepared()
        blocks: dict[int, Any] = {}
        for plan in go.plans:
            for index, (payload, nbytes) in self.plan_runner.made(plan.operation).items():
                for rank in self._takers(message, plan, index, mine):
                    blocks[index] = payload, nbytes, rank
                    self._promise(prepared, payload, rank)
        holds: list[Any] = []
        prepared.oid, prepared.holds = self._made(message, go, mine, blocks, holds, prepared)
        return prepared

    def _promise(self, prepared: Prepared, payload: int, rank: int) -> None:
        """Reserves a block that the member may read and return as soon as the engine has committed
        the call, even before this process has handled that event."""
        if promise(self.store, payload):
            prepared.blocks[payload] = rank

    def settle(
        self, prepared: Prepared, go: GroupAttempt, slots: dict[int, int]
    ) -> tuple[int, list[Any]]:
        """Gives members the blocks of a prepared result whose call is now committed. Returns the
        same as `commit`. slots: rank -> client slot of living members that receive blocks. `let_go`
        must be called when the engine no longer uses the blocks."""
        self.given = {}
        for source in prepared.sources:
            self.streaming_sources.keep(source)
        for plan in go.plans:
            prepared.holds += self.inner.pop(plan.operation, ())
            self.plan_runner.take(plan.operation, prepared.blocks)
        for payload, rank in prepared.blocks.items():
            keep_promise(self.store, payload, slots.get(rank, NODE_SLOT))
            if rank in slots:
                self.given.setdefault(rank, []).append(payload)
            else:
                self.client.give_back(payload)
        return prepared.oid, prepared.holds

    def _give(self, payload: int, slot: int, rank: int) -> None:
        """Leases a block of the result to a member's process."""
        self.store.leases[payload] = slot
        self.given.setdefault(rank, []).append(payload)

    def take_untaken(self, payloads: Iterable[int], slot: int) -> None:
        """Frees the blocks of a result that a member had not received when it left. slot: the
        client slot of the member."""
        for payload in payloads:
            if self.store.leases.get(payload) == slot:
                self.store.leases[payload] = NODE_SLOT
                self.client.give_back(payload)

    def let_go(self, prepared: Prepared) -> None:
        """Frees the blocks that members have already returned."""
        for payload in prepared.blocks:
            free_if_returned(self.store, payload)

    def take_back(self, prepared: Prepared) -> None:
        """Returns the blocks to the plan, because the attempt will not be committed."""
        for payload in prepared.blocks:
            keep_promise(self.store, payload, NODE_SLOT)
        prepared.holds.clear()

    def _made(
        self,
        message: GroupCommit,
        go: GroupAttempt | None,
        mine: dict[int, int],
        blocks: dict[int, Any],
        holds: list[Any],
        prepared: Prepared | None = None,
    ) -> tuple[int, list[Any]]:
        """Returns (the object that members read, the holds on its contents)."""
        data: Any = None
        kind, text = message.error, message.message
        try:
            if message.error or not mine:
                pass  # members here read only the error, or no members are here
            elif message.kind in FOLDING:
                data = self._folded(message, go, blocks, mine)
            else:
                data = self._copied(message, go, blocks, mine, holds, prepared)
        except Exception as error:  # otherwise members here would wait indefinitely
            _log.exception("the result of call %d of a group cannot be made", message.call)
            text = shorten(f"the result of call {message.call} cannot be made here: {error!r}")
            kind = error_kind(error)
        mask = mask_of(message.ranks)
        encoded = _serialize.encode((mask, kind, text, data))
        oid, hold = self._new()
        self.results.store_value(oid, encoded, False, instead=lambda: self._no_room(mask, message))
        self.results.untaken.pop(oid, None)
        return oid, [hold, *holds, *encoded.refs]

    def _no_room(self, mask: int, message: GroupCommit) -> _serialize.Encoded:
        """The error that members here read if not even the result's refs fit in the store."""
        kind, text = message.error or "full", message.message or self.store.full_message()
        return shortened((mask, kind, text, None), 2)

    def _new(self) -> tuple[int, Any]:
        oid = self.client.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
        return oid, self.client.hold(oid, False)

    def _object(self, payload: int, nbytes: int, holds: list[Any]) -> ObjectRef[Any]:
        """Turns a written block into an object for members here."""
        oid, hold = self._new()
        self.results.store_block(oid, payload, nbytes)
        holds.append(hold)
        return ObjectRef(ids.pack_id(self.client.host_id, oid), hold)

    def _blocks(
        self, message: GroupCommit, go: GroupAttempt | None, mine: dict[int, int], holds: list[Any]
    ) -> dict[int, Any]:
        """The blocks that have arrived, by their index in the plan. A block for a single rank is
        leased to that rank's process, which may write to it. Other blocks become objects."""
        found: dict[int, Any] = {}
        for plan in go.plans if go is not None else ():
            holds += self.inner.pop(plan.operation, ())
            for index, (payload, nbytes) in self.plan_runner.take(plan.operation).items():
                takers = self._takers(message, plan, index, mine)
                slot = mine[takers[0]] if len(takers) == 1 else 0
                if slot and payload in self.store.leases:
                    self._give(payload, slot, takers[0])
                    found[index] = payload, nbytes, takers[0]
                else:
                    found[index] = self._object(payload, nbytes, holds)
        return found

    def _takers(
        self, message: GroupCommit, plan: Plan, index: int, mine: dict[int, int]
    ) -> list[int]:
        """The ranks here that read a block."""
        kind, root = message.kind, message.root
        if kind in FOLDING and not isinstance(plan, Distribute) and plan.kind != kind:
            return []  # only the node itself reads the contributions to a fold without a kernel
        if kind == "reduce_scatter":
            return [index] if index in mine else []
        if kind in ("reduce", "gather"):
            return [root] if root in mine else []
        if kind in PREFIXES and not isinstance(plan, Distribute):
            return [rank for rank in mine if rank > plan.members[index]]
        if kind in TARGETED and not isinstance(plan, Distribute):
            target = plan.members[index] % len(plan.destinations)
            return [target] if target in mine else []
        return [rank for rank in mine if kind != "broadcast" or rank != root]

    def _folded(
        self,
        message: GroupCommit,
        go: GroupAttempt | None,
        blocks: dict[int, Any],
        mine: dict[int, int],
    ) -> Any:
        """[the whole result], or slices by rank, or None if no member here reads the result."""
        if message.pieces:  # a small result, or all contributions to a fold without a kernel
            payload = message.pieces[0].payload
            return [self._combined(message, blocks, go) if payload is None else payload]
        if message.kind == "reduce_scatter":
            return {rank: blocks[rank] for rank in mine if rank in blocks}
        return [blocks[0]] if 0 in blocks else None

    def _copied(
        self,
        message: GroupCommit,
        go: GroupAttempt | None,
        blocks: dict[int, Any],
        mine: dict[int, int],
        holds: list[Any],
        prepared: Prepared | None,
    ) -> Any:
        """The pieces by (source, target). Each is a payload, a ref, or a block as (payload offset,
        bytes, rank that receives it)."""
        found = {}
        for piece in message.pieces:
            got: Any = piece.payload
            source = None if got is not None else self.streaming_sources.get(piece.object)
            if source is not None:  # a block that a member here has written
                if _read_here(message, piece, mine):
                    got = self._object(*self.streaming_sources.keep(source), holds)
                elif prepared is not None and _comes_back(message, piece):
                    got = source.payload, source.nbytes, piece.source
                    prepared.sources.append(source)
                    self._promise(prepared, source.payload, piece.source)
                elif _comes_back(message, piece) and (slot := mine.get(piece.source)):
                    # Only the writer reads the block.
                    payload, nbytes = self.streaming_sources.keep(source)
                    self._give(payload, slot, piece.source)
                    got = payload, nbytes, piece.source
            elif got is None:
                got = self._piece(piece, go, blocks)
            if got is not None:
                found[piece.source, piece.target] = got
        return found

    def _piece(self, piece: Piece, go: GroupAttempt | None, blocks: dict[int, Any]) -> Any:
        """The location of a large piece: the object of a member here, or a block that has
        arrived."""
        host_id, oid = ids.unpack_id(piece.object)
        if host_id == self.client.host_id:
            return None if oid & BLOCK else self.results.ref(oid)
        for plan in go.plans if go is not None else ():
            if isinstance(plan, Distribute):
                return blocks.get(0)
            member = member_of(plan.kind, len(plan.destinations), piece.source, piece.target)
            if member in plan.members:
                return blocks.get(plan.members.index(member))
        return None

    def _combined(
        self, message: GroupCommit, blocks: dict[int, Any], go: GroupAttempt | None
    ) -> bytes:
        """The result of a fold without a kernel, which NumPy computes on this node in the order of
        ranks."""
        payloads: list[bytes | memoryview] = []
        for piece in message.pieces:
            if piece.payload is not None:
                payloads.append(piece.payload)
                continue
            source = self.streaming_sources.get(piece.object)
            if source is not None:
                payloads.append(self.client.memory(source.payload, source.nbytes))
                continue
            ref = self._piece(piece, go, blocks)
            assert ref is not None
            payloads.append(self._read(ids.unpack_id(ref._id)[1]))
        return combine(message.op, payloads)


def _read_here(message: GroupCommit, piece: Piece, mine: dict[int, int]) -> bool:
    """Whether a rank here other than the piece's own rank reads the piece."""
    readers = set(mine) - {piece.source}
    if message.kind == "gather":
        readers &= {message.root}
    if message.kind in PREFIXES:
        readers = {rank for rank in readers if rank > piece.source}
    if piece.target >= 0:
        readers &= {piece.target}
    return bool(readers)


def _comes_back(message: GroupCommit, piece: Piece) -> bool:
    """Whether the result of the piece's own rank contains the piece."""
    if message.kind in ROOTED and piece.source != message.root:
        return False
    return message.kind not in PREFIXES and piece.target in (-1, piece.source)
