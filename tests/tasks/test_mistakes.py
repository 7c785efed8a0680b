"""Wrong arguments and hostile requests: one clear error each, and the host lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp._protocol.local import Collective, GroupJoin, OpenPool
from tests.support.functions import add
from tests.support.processes import Program, run_program
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster


@pytest.mark.parametrize("deadline", [float("inf"), 1e300, np.float32(1), 1])
def test_deadlines_of_every_kind(cluster: Cluster, deadline: Any) -> None:
    refs = [cluster.put(1), cluster.put(2)]
    result = cluster.reduce(refs, deadline=deadline, reproducible=1, num=np.int64(2))  # type: ignore[arg-type]
    assert cluster.get(result) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.reduce([c.put(1)], deadline=True),
        lambda c: c.reduce([c.put(1)], deadline=Decimal(1)),
        lambda c: c.reduce([c.put(1)], num=True),
        lambda c: c.group("x" * 2000, 1),
        lambda c: c.options(restarts=2**64),
        lambda c: c.options(env={"NAME": "caf\udce9"}),
        lambda c: c.group("x", 2**63),
        lambda c: c.group("x", 2, 2**63),
        lambda c: c.executor(True),
        lambda c: c.executor(260),
        lambda c: c.executor(10**30),
        lambda c: c.executor(1, max_tasks_per_child=True),
        lambda c: c.options(retries=True),
        lambda c: c.get(c.put(1), timeout=float("nan")),
    ],
)
def test_wrong_arguments(cluster: Cluster, call: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|at most|no group"):
        call(cluster)
    assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.submit(5), "a function or an object that can be called, not 5"),
        (lambda c: list(c.map("len", [1])), "can be called, not 'len'"),
        (lambda c: c.options(retry_exceptions=[OSError]).submit(5), "can be called, not 5"),
        (lambda c: c.wait(5), "a ref, a Future, or an iterable of them, not int 5"),
        (lambda c: c.empty("a"), "shape='a': it must be an integer"),
        (lambda c: c.empty((2, 1.5)), r"shape=\(2, 1.5\): it must be an integer"),
        (lambda c: c.actor(5), "created from a class, not from 5"),
    ],
)
def test_arguments_of_a_wrong_type(cluster: Cluster, call: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call(cluster)
    assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_iterators_of_refs_are_waited_for_like_lists(cluster: Cluster) -> None:
    refs = [cluster.put(n) for n in range(3)]
    assert cluster.wait(iter(refs)) == (refs, [])
    assert cluster.wait(refs[0]) == (refs[:1], [])


def test_more_memory_than_a_process_can_address() -> None:
    with pytest.raises(
        hoplite_mp.ConfigError, match=r"memory=109951162777600: .* at most .*16 TiB"
    ):
        hoplite_mp.Cluster(workers=1, memory="100TiB")


@pytest.mark.parametrize("hosts", [5, ["-oProxyCommand=touch"], ["a", ""]])
def test_hosts_that_are_no_names(hosts: Any) -> None:
    """One that begins with a dash would be an option of ssh."""
    with pytest.raises(ValueError, match=r"hosts=.*: it must be a list of names"):
        hoplite_mp.Cluster(hosts=hosts)


def test_a_command_with_an_open_quotation() -> None:
    config = hoplite_mp.Config(hosts_command="ssh '{host} {arguments} ")
    with pytest.raises(hoplite_mp.ConfigError, match=r"hosts_command=.*: No closing quotation"):
        hoplite_mp.Cluster(1, hosts=["a"], config=config, token="00" * 32)


@pytest.mark.parametrize("where", [{"address": 7000}, {"listen": ("a", 1)}])
def test_addresses_that_are_no_text(where: Any) -> None:
    with pytest.raises(hoplite_mp.ConfigError, match="it must be text, such as"):
        hoplite_mp.Cluster(workers=1, **where)


def test_ends_of_what_is_no_actor() -> None:
    for end in (hoplite_mp.Actor.close, hoplite_mp.Actor.kill, hoplite_mp.Actor.restarts):
        with pytest.raises(TypeError, match="expected the handle of an actor, not 5"):
            end(5)  # type: ignore[arg-type]


def test_requests_that_no_method_would_send(cluster: Cluster) -> None:
    runtime = cluster._runtime
    for ask in (GroupJoin("x" * 3000, 1, None), OpenPool(1 << 70, 0, 0), OpenPool(1, -1, 1 << 63)):
        with pytest.raises((ValueError, OverflowError)):
            runtime.channel.call(ask)
    (hold,) = runtime.collective([cluster.put(1)], "reduce", "sum", 1, None, False, 1)
    cluster.wait([hoplite_mp.ObjectRef(runtime.memory.public_id(hold.oid), hold)])
    result = runtime.client.new(3, 1, 0, 0)  # an operation, WAITING for the node
    runtime.submitter.expect(result, None, None)
    runtime.channel.tell(Collective([result], [], "reduce", "sum", 0, None, False))
    with pytest.raises(ValueError, match="refused"):
        cluster.get(runtime.memory.own_ref(result), PATIENCE_S)
    assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_thousands_of_sources_are_deleted(cluster: Cluster, tmp_path: Path) -> None:
    refs = [cluster.put(n) for n in range(14_000)]
    result = cluster.reduce([*refs, cluster.submit(wait_for, tmp_path / "go")])
    cluster.delete(refs)
    assert len(cluster.nodes) == 1  # the node has read all that was sent before
    (tmp_path / "go").touch()
    with pytest.raises(hoplite_mp.ReduceError):
        cluster.get(result, PATIENCE_S)
    assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_an_exit_code_of_the_users_breaks_no_pool(cluster: Cluster) -> None:
    with pytest.raises(hoplite_mp.WorkerLostError):
        cluster.options(retries=0).submit(os._exit, 97).result(PATIENCE_S)
    assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_a_view_of_a_closed_executor_is_closed(cluster: Cluster) -> None:
    pool = cluster.executor(1)
    view = pool.options(name="x")
    left = pool.map(abs, range(10), buffersize=2, chunksize=2)
    assert next(left) == 0
    pool.shutdown()
    with pytest.raises(hoplite_mp.ClosedError):
        view.submit(abs, -1)
    with pytest.raises(hoplite_mp.ClosedError):
        list(left)


def test_leaving_a_view_ends_its_executor(cluster: Cluster) -> None:
    pool = cluster.executor(1)
    with pool.options(name="x") as view:
        future = view.submit(time.sleep, 0.1)
    assert future.done()
    with pytest.raises(hoplite_mp.ClosedError):
        pool.submit(abs, -1)


def test_a_submit_while_another_thread_shuts_down(cluster: Cluster) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            entered.set()
            ended.wait(PATIENCE_S)
            return (int, ())

    entered, ended = threading.Event(), threading.Event()
    pool = cluster.executor(1)
    outcome: list[Any] = []

    def submits() -> None:
        try:
            outcome.append(pool.submit(abs, Slow()).result(PATIENCE_S))
        except hoplite_mp.ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=submits)
    thread.start()
    entered.wait(PATIENCE_S)
    pool.shutdown()
    ended.set()
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], hoplite_mp.ClosedError)


def test_spmd_of_what_does_not_pickle_leaves_no_process() -> None:
    with hoplite_mp.Cluster(1) as cluster:
        cluster.submit(add, 1, 2).result()
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(TypeError):
            cluster.spmd(threading.Lock(), 3)  # type: ignore[arg-type]
        eventually(lambda: set(psutil.Process().children(recursive=True)) <= before)


def test_a_forced_cancel_at_once_after_the_start() -> None:
    for _ in range(3):
        with hoplite_mp.Cluster(2) as cluster:
            futures = [cluster.submit(time.sleep, 1000) for _ in range(2)]
            eventually(lambda f=futures: all(future.running() for future in f))
            for future in reversed(futures):
                assert future.cancel(force=True)
            both = [cluster.spmd(add, 2)[1], *(cluster.submit(add, 1, 2) for _ in range(4))]
            assert [future.result(PATIENCE_S) for future in both] == [1, 3, 3, 3, 3]


def test_the_arguments_of_a_finished_task_go_by_themselves() -> None:
    config = hoplite_mp.Config(spill_bytes_max=0, put_wait_s=PATIENCE_S)
    with hoplite_mp.Cluster(1, memory="96MiB", config=config) as cluster:
        assert cluster.submit(len, np.zeros(60 << 20, "u1")).result() == 60 << 20
        cluster.put(np.zeros(60 << 20, "u1"))


def test_what_a_task_has_started_goes_with_the_host() -> None:
    def starts() -> int:  # nobody waits so long for it
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    with hoplite_mp.Cluster(1) as cluster:
        pid = cluster.submit(starts).result()
        assert psutil.pid_exists(pid)
    eventually(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )


def test_as_completed_in_a_forked_child(cluster: Cluster, tmp_path: Path) -> None:
    future = cluster.submit(wait_for, tmp_path / "go")
    child = os.fork()
    if child == 0:
        try:
            list(hoplite_mp.as_completed([future], PATIENCE_S))
        except hoplite_mp.ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    (tmp_path / "go").touch()
    future.result(PATIENCE_S)


def test_a_config_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"config=5: it must be a hoplite_mp\.Config, or None"):
        hoplite_mp.Cluster(config=5)  # type: ignore[arg-type]


AFTER_A_FORK = """
c = hoplite_mp.Cluster(workers=1)
class Counter:
    def add(self, n):
        return n
actor = c.actor(Counter)
pool = c.executor(1)
ref = c.put(1)
answers = [f.result(30) for f in (c.submit(abs, -1), pool.submit(abs, -1), actor.add(1))]
assert answers == [1, 1, 1]
group = c.group("alone", 1, 0)
group.barrier()
calls = [
    lambda: c.submit(abs, -1),
    lambda: pool.submit(abs, -1),
    lambda: c.put(1),
    lambda: c.get(ref),
    lambda: c.nodes,
    lambda: c.stats(),
    lambda: actor.add(1),
    lambda: c.actor(Counter),
    lambda: c.executor(1),
    lambda: group.barrier(),
    lambda: c.group("another", 1, 0).barrier(),
    lambda: hoplite_mp.current(),
    lambda: hoplite_mp.Queue(),
]
def report():
    for call in calls:
        try:
            say("gave", call())
        except Exception as error:
            say(type(error).__name__, error)
"""


def test_calls_in_a_forked_child_say_that_the_process_was_forked() -> None:
    out = run_program(
        AFTER_A_FORK
        + """
if os.fork() == 0:
    report()
    os._exit(0)
os.wait()
c.shutdown()
"""
    )
    assert len(out.splitlines()) == 13
    for line in out.splitlines():
        assert line.startswith(
            "ClosedError this process was forked from the process that opened"
        ), out


def test_calls_after_shutdown_do_not_speak_of_a_fork() -> None:
    out = run_program(AFTER_A_FORK + "c.shutdown()\nreport()")
    assert len(out.splitlines()) == 13
    for line in out.splitlines():
        assert line.startswith("ClosedError ")
        assert "fork" not in line


def debugs() -> None:
    import pdb

    pdb.set_trace()


def breaks() -> None:
    breakpoint()


@pytest.mark.parametrize("task", [debugs, breaks])
def test_a_debugger_in_a_task_says_that_tasks_have_no_stdin(cluster: Cluster, task: Any) -> None:
    with pytest.raises(RuntimeError, match=r"a task has no stdin, so pdb .*Cluster\(debug=True\)"):
        cluster.submit(task).result(PATIENCE_S)
    with pytest.raises(EOFError):
        cluster.submit(input).result(PATIENCE_S)
    assert cluster.submit(lambda: sys.stdin.read()).result(PATIENCE_S) == ""


NOBODY = {"address": "127.0.0.1:1", "token": "0123456789abcdef0123456789abcdef"}


def test_connecting_to_an_address_that_does_not_answer_times_out() -> None:
    with pytest.raises(hoplite_mp.ManagerLostError):
        hoplite_mp.Cluster(**NOBODY, config=hoplite_mp.Config(connect_timeout_s=0.5))


def test_connecting_logs_the_address_that_does_not_answer() -> None:
    """The program would wait for ten minutes, and is ended when the message is there."""
    program = Program(
        f"""
        import logging
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        hoplite_mp.Cluster(**{NOBODY}, config=hoplite_mp.Config(connect_timeout_s=600.0))
        """
    )
    found = program.line()
    program.signal(signal.SIGKILL)
    program.end(-signal.SIGKILL)
    assert found == "waiting for 127.0.0.1:1 ... (Connection refused)"
