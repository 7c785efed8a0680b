"""Sets up a worker's process after the fork, and runs the worker.

The supervisor forks the process with a few descriptors. The process becomes a client of its host's
node, runs its pool's initializer or creates its actor's object, and reports success or failure to
the node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._client import inherited_context
from hoplite_mp._client.actors import ActorSetup
from hoplite_mp._client.channel import Channel
from hoplite_mp._client.descriptors import lift
from hoplite_mp._client.runtime import Runtime
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import FIRST_SLOT
from hoplite_mp._protocol.actors import ActorFailed
from hoplite_mp._protocol.fields import shorten
from hoplite_mp._protocol.local import SETUP_FAILED, InitializerDone, InitializerFailed
from hoplite_mp._worker import actor, checkpoints, preimport
from hoplite_mp._worker.forked import end_if_forked
from hoplite_mp._worker.inherited_context import take_after
from hoplite_mp._worker.preimport import offer_stacks, warm_up, warm_up_worker
from hoplite_mp._worker.stdio import OutputRouting, note_prints, without_stdin
from hoplite_mp._worker.task_loop import Worker
from hoplite_mp.config import Config

if TYPE_CHECKING:
    from hoplite_mp._protocol.spawning import InheritedContext

__all__ = ["main", "prepare", "warm_up"]

SETUP_SUMMARY_CHARS_MAX, SETUP_TEXT_CHARS_MAX = 1000, 16_000


def prepare(worker: Worker, setup: int) -> bool:
    """Runs the pool's initializer or creates the actor's object, and informs the node. Returns
    False if the setup has failed, so that this process must exit with SETUP_FAILED."""
    channel = worker.runtime.channel
    try:
        _set_up(worker, setup)
    except BaseException as error:
        end_if_forked(worker.pid, error)
        if worker.is_actor:
            channel.call(ActorFailed(worker.error_in_message(error)))
            return False
        text = traceback.format_exc()
        with contextlib.suppress(Exception):  # the initializer may have replaced or closed stderr
            sys.stderr.write(text)
            sys.stderr.flush()
        summary = traceback.format_exception_only(error)[-1].strip()
        # `call` waits for the reply, so the message arrives before the node detects this process's
        # exit.
        channel.call(
            InitializerFailed(
                shorten(summary[:SETUP_SUMMARY_CHARS_MAX]),
                shorten(f"in {worker.runtime.label}:\n{text[-SETUP_TEXT_CHARS_MAX:]}"),
            )
        )
        return False
    end_if_forked(worker.pid)
    inherited_context.forget()
    channel.tell(InitializerDone())
    return True


def _set_up(worker: Worker, setup: int) -> None:
    brought = _serialize.begin_run()
    found = worker.memory.read(setup, FOREVER_NS, False)
    if isinstance(found, ActorSetup):
        worker.become_actor(found)
        (checkpoints.begin if found.checkpoint else actor.make)(worker.runtime, found)
        _serialize.end_run(brought)
        return
    initializer, initargs = found
    function, carried = _serialize.decode_with_carried(initializer)
    carried.check()
    function(*initargs)
    _serialize.end_run(brought)


def main(
    control_fd: int,
    store_fd: int,
    event_fd: int,
    rpc_fd: int,
    slot: int,
    pool: int,
    max_tasks: int,
    setup: int,
    output_owner: int,
    label: str,
    config: dict[str, Any],
    inherited_settings: InheritedContext,
    inherited: list[int],
) -> int:
    """Runs the worker in the forked child. Returns the exit code."""
    channel = Channel(socket.socket(fileno=rpc_fd))
    event_fd = lift(event_fd)
    runtime = Runtime(control_fd, store_fd, event_fd, slot, channel, Config(**config), label)
    for fd in (control_fd, store_fd):  # both are already mapped
        os.close(fd)
    worker = Worker(runtime, pool, max_tasks, OutputRouting(runtime.client.host_id, output_owner))
    runtime.submitter.output_owner = output_owner
    _serialize.begin_main(output_owner)
    _serialize.large_copies.copy = runtime.memory.private_copy
    signal.signal(signal.SIGUSR1, worker.on_signal)
    take_after(inherited_settings, slot - FIRST_SLOT + 1)
    offer_stacks()
    without_stdin()
    note_prints(runtime.client.note_printed)
    warm_up_worker(runtime)
    if setup:
        inherited_context.receive([lift(fd) for fd in inherited])
        if not prepare(worker, setup):
            return SETUP_FAILED
    else:
        worker.first_use = True
        preimport.put_off_collections()
    try:
        worker.loop()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # tasks may have replaced or closed the stream
                stream.flush()
    return 0
