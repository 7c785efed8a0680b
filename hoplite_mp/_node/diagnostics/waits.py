"""Reports what each process on this host is waiting for, to diagnose hangs.

Each component reports its own waits. This file collects the reports and limits their number. It
changes no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import (
    CLIENT_DRIVER,
    DRIVER_SLOT,
    GONE,
    KIND_FOREIGN,
    KIND_OPERATION,
    KIND_STREAM,
    KIND_TASK,
    NODE_SLOT,
    PENDING,
    STATE,
    VALUED,
)
from hoplite_mp._node.io.processes import hostname
from hoplite_mp._protocol.diagnostics import (
    EVENT,
    PIECE_BYTES_MAX,
    DiagnosticsResponse,
    DumpRequest,
)
from hoplite_mp._protocol.local import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.collectives.operations import Operations
    from hoplite_mp._node.diagnostics.tracing import Recording
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.ports import StacksPort
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.retry_delays import RetryDelays
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.local import Request

__all__ = ["WAITS_MAX", "WaitReports"]

# The number of entries of one kind (e.g. waiting tasks) that an answer lists. Further entries are
# only counted. Higher: a longer answer, which takes 0.1 ms of the node's time for ten entries.
WAITS_MAX = 100
NEEDS_MAX = 5  # the number of missing objects that are listed for one task or collective
# How long nodes may take to answer, including the stacks of their workers. Higher: slow nodes are
# included. Lower: an unresponsive node is reported sooner.
DUMP_PATIENCE_S = 3.0
# Kinds of entries that other components add, if these components exist.
MORE = ("transfers", "groups", "actors", "actor calls")


class WaitReports:
    """Collects the waits on this host, and on all hosts at the request of a process."""

    def __init__(
        self,
        host: HostContext,
        recording: Recording,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        inbound_tasks: InboundTasks,
        operations: Operations,
        delays: RetryDelays,
        stacks: StacksPort,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.clients = host.clients
        self.tasks = host.tasks
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.roster = host.roster
        self.reply = host.reply
        self.send_peer = host.send_peer
        self.questions = host.questions
        self.recording = recording
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.inbound_tasks = inbound_tasks
        self.operations = operations
        self.delays = delays
        self.stacks = stacks
        self._more: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {}
        # Slot of the requesting client -> node -> the node's answer.
        self.dumps: dict[int, dict[int, bytes]] = {}

    def add(self, kind: str, gather: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Registers a component that reports waits of some kind."""
        self._more[kind] = gather

    # -- requests -------------------------------------------------------------------------------

    def ask(self, slot: int, request: Request) -> None:
        """Collects the waits on all nodes for a process, which then reads them in pieces."""
        stacks: bool = request.ask.stacks  # type: ignore[union-attr]
        line = self.clients.get(slot)
        numbers = {host_id: member.node for host_id, member in self.roster.by_host_id.items()}

        def done(found: dict[int, Answer]) -> None:
            if self.clients.get(slot) is not line:
                return
            answers = {answer.node: answer.message.data for answer in found.values()}
            silent = sorted(set(numbers.values()) - answers.keys())

            def collected(own: bytes) -> None:
                if self.clients.get(slot) is line:
                    answers[self.client.number] = own
                    self.dumps[slot] = answers
                    sizes = sorted((number, len(data)) for number, data in answers.items())
                    self.reply(slot, Reply(request.number, (sizes, silent)))

            self.collect(stacks, collected)

        def make(number: int) -> DumpRequest:
            return DumpRequest(number, stacks)

        self.questions.ask_all(numbers, make, done, DUMP_PATIENCE_S)

    def piece(self, slot: int, request: Request) -> None:
        """Replies with a piece of a node's answer."""
        ask: Any = request.ask
        data = self.dumps.get(slot, {}).get(ask.node, b"")
        reply = Reply(request.number, data[ask.offset : ask.offset + PIECE_BYTES_MAX])
        self.reply(slot, reply)

    def forget_client(self, slot: int) -> None:
        """Discards the answers for a process that has exited."""
        self.dumps.pop(slot, None)

    def asked(self, host_id: int, message: DumpRequest) -> None:
        """Answers another node's request."""

        def collected(data: bytes) -> None:
            self.send_peer(host_id, DiagnosticsResponse(message.number, data=data))

        self.collect(message.stacks, collected)

    def collect(self, stacks: bool, done: Callable[[bytes], None]) -> None:
        """Collects this host's waits, and its workers' stacks if `stacks`. Calls `done` with the
        packed result."""
        found = self.gather()
        if not stacks:
            done(msgspec.msgpack.encode(found))
            return

        def collected(texts: list[dict[str, Any]]) -> None:
            found["stacks"] = some(texts)
            done(msgspec.msgpack.encode(found))

        self.stacks.ask(collected)

    # -- collecting -----------------------------------------------------------------------------

    def gather(self) -> dict[str, Any]:
        """All waits as plain values: the first WAITS_MAX entries of each kind, and the total
        number."""
        return {
            "node": self.client.number,
            "host": hostname(),
            **self._unclaimed(),
            "running": some(self._running()),
            "sent": some(self._sent()),
            "collectives": some(self._collectives()),
            "parts": some(self._parts()),
            "processes": some(self._processes()),
            **{kind: some(self._more[kind]() if kind in self._more else ()) for kind in MORE},
        }

    def _unclaimed(self) -> dict[str, Any]:
        """The tasks that are waiting for their arguments, and the queued tasks. Tasks that are
        waiting for a retry count as queued."""
        delayed = self.delays.waiting()
        waiting, count = self.tasks.unfinished(STATE["WAITING"], WAITS_MAX + len(delayed))
        queued, more = self.tasks.unfinished(STATE["QUEUED"], WAITS_MAX)
        missing = [oid for oid in waiting if oid not in delayed][:WAITS_MAX]
        pauses = [self._queued(oid) | {"pause": delayed[oid]} for oid in list(delayed)[:WAITS_MAX]]
        first = [self._queued(oid) for oid in queued[: WAITS_MAX - len(pauses)]]
        return {
            "waiting": {
                "count": count - len(delayed), "first": [self._waiting(oid) for oid in missing],
            },
            "queued": {"count": more + len(delayed), "first": first + pauses},
        }  # fmt: skip

    def _task(self, oid: int, since_ns: int) -> dict[str, Any]:
        return {
            "name": self.tasks.name(oid),
            "id": self._id(oid),
            "seconds": self._seconds(since_ns),
        }

    def _id(self, oid: int) -> str:
        return self.imports.public(oid).hex()

    def _waiting(self, oid: int) -> dict[str, Any]:
        """A task that is not queued yet because some of its arguments are missing."""
        found = self._task(oid, self.tasks.submitted_ns(oid))
        missing = []
        try:
            for need in self._needs(oid):
                where = self.where(need)
                if where:
                    missing.append({"id": need.hex(), "where": where})
        except (ValueError, IndexError):  # the task's record is being written
            pass
        owner = self.client.inspect(oid)["owner"]
        found["by"] = self.process(owner)
        found["missing"] = len(missing)
        found["needs"] = missing[:NEEDS_MAX]
        return found

    def _needs(self, oid: int) -> list[bytes]:
        _, args_id, inline, *_ = self.tasks.task(oid)
        mem = memoryview(inline)
        if args_id:
            got = self.client.view(args_id)
            if isinstance(got, int):
                return []
            mem = memoryview(got)
        return (_serialize.read_dependencies(mem) or _serialize.read_refs(mem)) if mem else []

    def _queued(self, oid: int) -> dict[str, Any]:
        found = self._task(oid, self.tasks.submitted_ns(oid))
        number = self.tasks.pool_of(oid)
        pool = self.workers.pools.get(number)
        found["pool"] = number
        found["workers"] = 0 if pool is None else len(pool.workers)
        inbound_task = self.inbound_tasks.by_oid.get(oid)
        found["from"] = "" if inbound_task is None else self._peer(inbound_task.peer)
        return found

    def _running(self) -> Iterable[dict[str, Any]]:
        """The tasks on the stacks of this host's processes."""
        for slot in list(self.clients):
            for event in EVENT.iter_unpack(self.recording.running(slot)):
                oid, begin_ns, depth = event[0], event[1], event[5]
                yield {
                    "name": event[7].split(b"\0")[0].decode(errors="replace"),
                    "id": self._id(oid),
                    "seconds": self._seconds(begin_ns),
                    "on": self.process(slot),
                    "inside": depth - 1,
                }

    def _sent(self) -> Iterable[dict[str, Any]]:
        for oid, runner in list(self.outbound_tasks.where.items()):
            yield self._task(oid, self.tasks.submitted_ns(oid)) | {"to": f"h{runner.number}"}

    def _collectives(self) -> Iterable[dict[str, Any]]:
        for operation in list(self.operations.operations.values()):
            ask = operation.ask
            waiting = sorted((i, oid) for oid, at in operation.waiting.items() for i in at)
            yield {
                "operation": operation.number,
                "kind": ask.kind,
                "op": ask.op,
                "seconds": self._seconds(operation.asked_ns),
                "by": self.process(operation.slot),
                "sources": len(ask.sources),
                "num": ask.num,
                "missing": len(waiting),
                "needs": [
                    {"index": index, "id": self._id(oid), "where": self.where_local(oid)}
                    for index, oid in waiting[:NEEDS_MAX]
                ],
                "planned": self._seconds(operation.planned_ns) if operation.planned_ns else None,
                "epoch": operation.epoch,
                "waits_for": list(operation.waits_for),
                "waits_for_space": operation.plan is not None,
                "to": list(ask.to),
            }

    def _parts(self) -> Iterable[dict[str, Any]]:
        """This node's parts of plans for collectives, which any node may have requested."""
        plan_runner = self.operations.plan_runner
        for execution in () if plan_runner is None else plan_runner.collectives():
            yield {
                "operation": execution.plan.operation,
                "epoch": execution.plan.epoch,
                "seconds": self._seconds(execution.begun_ns),
                "begun": execution.begun,
                "reported": execution.reported,
                "missing": len(execution.missing) + execution.waiting,
            }

    def _processes(self) -> Iterable[dict[str, Any]]:
        """The processes that are sleeping until an object is done."""
        for slot in list(self.clients):
            info = self.client.client_info(slot)
            oid = info["waiting_id"]
            if not oid and not info["blocked"]:
                continue
            running = info["running"]
            yield {
                "pid": info["pid"],
                "process": self.process(slot),
                "task": self.tasks.name(running) if running else "",
                "blocked": bool(info["blocked"]),
                "id": self._id(oid) if oid else "",
                "where": self.where_local(oid) if oid else "",
                "more": max(0, info["waiting_n"] - 1) if oid else 0,
                "seconds": self._seconds(info["waiting_ns"]) if oid else None,
            }

    # -- descriptions for users -----------------------------------------------------------------

    def process(self, slot: int) -> str:
        """Describes a process on this host for users."""
        if slot == NODE_SLOT:
            return "the node"
        pid = self.tasks.pid(slot)
        if slot == DRIVER_SLOT:
            return f"the driver (pid {pid})"
        if self.client.client_info(slot)["kind"] == CLIENT_DRIVER:
            return f"an attached driver (pid {pid})"
        return f"worker {slot} (pid {pid})"

    def _seconds(self, since_ns: int) -> float | None:
        """The number of seconds since then, or None if the time is unknown."""
        return None if not since_ns else round((self.loop.now_ns() - since_ns) / 1e9, 3)

    def _peer(self, host_id: int) -> str:
        number = self.roster.number_of(host_id)
        return "a host that is gone" if number is None else f"h{number}"

    def where(self, object_id: bytes) -> str:
        """Describes the location of an object that is not ready, or returns "" if it is ready."""
        oid = self.imports.local(object_id) or None
        if oid is None:
            host_id, _ = ids.unpack_id(object_id)
            return f"an object of {self._peer(host_id)}"
        return self.where_local(oid)

    def where_local(self, oid: int) -> str:
        """Like `where`, but for an object with a header on this host."""
        header = self.client.inspect(oid)
        state = header["state"]
        if header["id"] != oid or STATE[state] in GONE:
            return "gone"
        if STATE[state] in VALUED:
            remote = self.remote_objects.by_oid.get(oid)
            if remote is not None and remote.making:
                return "lost, and is being located or reconstructed"
            if remote is None or not remote.payload:
                return ""
            return "ready, its bytes are being transferred from another host"
        if STATE[state] not in PENDING:
            return f"{state.lower()}"
        if header["kind"] == KIND_TASK:
            result = f"the result of {self.tasks.name(oid)}()"
            if state == "WAITING":
                return f"{result}, which is itself waiting"
            if state == "QUEUED":
                return f"{result}, which is queued"
            runner = self.outbound_tasks.where.get(oid)
            if runner is not None:
                return f"{result}, which was sent to h{runner.number}"
            return f"{result}, which runs on {self.process(header['claimant'])}"
        if header["kind"] == KIND_OPERATION:
            for operation in self.operations.operations.values():
                if oid in operation.ask.results:
                    return f"the result of a {operation.ask.kind} (operation {operation.number})"
            return "the result of a collective"
        if header["kind"] == KIND_FOREIGN:
            record = self.imports.by_oid.get(oid)
            return "pending at " + ("another host" if record is None else self._peer(record.owner))
        claimant = self.process(header["claimant"])
        if header["kind"] == KIND_STREAM:
            return f"the next item of {self.client.task_name(oid)}(), which runs on {claimant}"
        return f"being written by {claimant}"


def some(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first WAITS_MAX items, and the total number."""
    found = list(items)
    return {"count": len(found), "first": found[:WAITS_MAX]}
