"""Whole programs, and how they end: Ctrl-C, errors, forks, kills. Nothing of them stays."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.support.processes import Program, gone, run_program
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.usefixtures("as_users_start_them")


@pytest.mark.parametrize("opened", ["c = hoplite_mp.Cluster(2)", "c = hoplite_mp.Executor(2)"])
def test_ctrl_c_without_a_with_block_does_not_wait_for_tasks(opened: str) -> None:
    program = Program(
        f"""
        {opened}
        futures = [c.submit(time.sleep, 600) for _ in range(5)]
        while not futures[0].running(): time.sleep(0.001)
        say("ready")
        futures[0].result()
        """
    )
    assert program.line() == "ready"
    assert program.family
    program.signal(signal.SIGINT)
    _, err = program.end(None)
    assert program.process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1


def test_an_error_that_ends_a_program_does_not_wait_for_tasks() -> None:
    program = Program(
        """
        c = hoplite_mp.Cluster(1)
        future = c.submit(time.sleep, 600)
        while not future.running(): time.sleep(0.001)
        say("ready")
        raise ZeroDivisionError("on purpose")
        """
    )
    assert program.line() == "ready"
    _, err = program.end(1)
    assert "on purpose" in err


def test_a_program_that_ends_in_order_waits_for_tasks() -> None:
    out = run_program(
        """
        import atexit
        c = hoplite_mp.Cluster(1)
        def late(n):
            time.sleep(0.2)
            print("task", n)
        futures = [c.submit(late, n) for n in range(2)]
        sys.exit(5)
        """,
        code=5,
    )
    assert out.splitlines() == ["(worker 2@h0) task 0", "(worker 2@h0) task 1"]


def test_ctrl_c_at_many_moments_leaves_the_cluster_usable() -> None:
    """Interrupts fall into submit, put, get, result, map, and what they call."""
    program = Program(
        """
        left = 0
        def alarm(every):  # the second one may come while the first one is dealt with
            global left
            left = 2
            signal.setitimer(signal.ITIMER_REAL, every, every)
        def interrupt(number, frame):
            global left
            left -= 1
            if left >= 0:
                raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        big = np.ones(200_000)
        interrupted = rounds = 0
        with hoplite_mp.Cluster(workers=2, memory="256MiB") as c:
            c.submit(abs, 1).result()
            end = time.monotonic() + 1.5
            while time.monotonic() < end or interrupted <= 20:
                try:
                    try:
                        alarm(0.004)
                        while True:
                            if left <= 0:  # both have come where Python drops them, in a __del__
                                alarm(0.004)
                            c.get(c.put(big)); c.submit(np.sum, big).result(); rounds += 1
                            f = [c.submit(abs, -n) for n in range(20)]
                            list(c.map(abs, range(40))); c.wait(f); c.stats()
                            c.submit(abs, f[0]).result()
                    finally:
                        alarm(0)
                except KeyboardInterrupt:
                    interrupted += 1
            alarm(0)
            f = None
            say(c.submit(pow, 2, 5).result(20), c.get(c.put("put")), len(c.get(c.put(big))))
            say(list(c.map(abs, range(-3, 0))), c.stats()["workers_lost"])
        """
    )
    out, _ = program.end(0)
    assert out.splitlines() == ["32 put 200000", "[3, 2, 1] 0"]


def test_a_fork_in_the_driver_goes_its_own_way() -> None:
    """The child leaves as children do, through its parent's with block; the parent goes on."""
    out = run_program(
        """
        with hoplite_mp.Cluster(workers=1) as c:
            ref, future = c.put([1, 2]), c.submit(time.sleep, 0.3)
            pid = os.fork()
            if pid == 0:
                for call in (
                    lambda: c.get(ref), lambda: c.put(1), lambda: c.submit(abs, 1),
                    lambda: c.wait([ref]), lambda: c.stats(), hoplite_mp.current,
                ):
                    try:
                        call()
                        say("no error")
                    except hoplite_mp.ClosedError:
                        pass
                with hoplite_mp.Cluster(workers=1) as own:
                    say("child", own.submit(abs, -7).result())
                sys.exit(9)
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            say(c.get(ref), future.result(), c.submit(abs, -1).result())
        """
    )
    assert out.splitlines() == ["child 7", "9", "[1, 2] None 1"]


@pytest.mark.parametrize("end", ["os._exit(4)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_tasks_have_started_goes_with_the_driver(end: str) -> None:
    program = Program(
        f"""
        def start(): return subprocess.Popen(["sleep", "600"]).pid
        def deaf():
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            time.sleep(600)
        c = hoplite_mp.Cluster(workers=2)
        pid = c.submit(start).result()
        futures = [c.submit(deaf), c.submit(time.sleep, 600)]
        while not all(f.running() for f in futures): time.sleep(0.001)
        say(pid)
        sys.stdin.readline()
        {end}
        """
    )
    child = psutil.Process(int(program.line()))
    assert child in program.family
    assert len(program.family) >= 6  # supervisor, node, manager, two workers, sleep
    program.process.communicate("go\n", timeout=PATIENCE_S)
    assert program.process.returncode in (4, -signal.SIGKILL)
    gone(program.family)


def test_lines_come_at_once_and_whole() -> None:
    program = Program(
        """
        def talk(path):
            print("begin")
            print("half", end=" ")
            sys.stderr.write("no end of line")
            while not os.path.exists(path): time.sleep(0.001)
            print("a line")
            print("ü" * 5, "\\n" + "x" * 300_000)
        import tempfile
        with tempfile.TemporaryDirectory() as folder, hoplite_mp.Cluster(workers=1) as c:
            future = c.submit(talk, folder + "/go")
            sys.stdin.readline()
            open(folder + "/go", "w").close()
            future.result()
        """
    )
    assert program.line() == "(worker 2@h0) begin"  # while the task runs
    out, err = program.process.communicate("go\n", timeout=30)
    assert program.process.returncode == 0, err
    lines = out.splitlines()
    assert lines[:2] == ["(worker 2@h0) half a line", "(worker 2@h0) üüüüü "]
    assert "".join(line.removeprefix("(worker 2@h0) ") for line in lines[2:]) == "x" * 300_000
    assert err == "(worker 2@h0) no end of line\n"
    gone(program.family)


def test_what_a_worker_said_before_it_died() -> None:
    out = run_program(
        """
        def last():
            print("last words")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        with hoplite_mp.Cluster(workers=1) as c:
            f = c.options(retries=0, name="a name").submit(last)
            say(f.exception())
        """
    )
    assert "(worker 2@h0) last words" in out
    assert "while running a name();" in out


def test_the_death_of_a_host_ends_every_wait() -> None:
    """The supervisor is killed: whoever waits, by whatever means, learns of it."""
    out = run_program(
        """
        import concurrent.futures as cf, logging
        logging.disable()
        c = hoplite_mp.Cluster(workers=1)
        future = c.submit(time.sleep, 600)
        queued = c.submit(abs, future)
        while not future.running(): time.sleep(0.001)
        threading.Timer(0.2, psutil.Process().children()[0].kill).start()
        done, _ = cf.wait([future, queued], timeout=30)
        say(len(done), type(future.exception()).__name__, type(queued.exception()).__name__)
        for call in (lambda: c.get(future), lambda: c.submit(abs, 1).result(20), c.stats):
            try:
                call()
            except hoplite_mp.NodeLostError:
                say("lost")
        c.shutdown()
        """,
    )
    assert out.split() == ["2", "NodeLostError", "NodeLostError", "lost", "lost", "lost"]


def test_environment_arguments_and_streams_of_workers() -> None:
    program = Program(
        """
        import warnings
        def look():
            return os.environ["MINE"], sys.stdin.read(), sys.flags.dev_mode, len(warnings.filters)
        with hoplite_mp.Cluster(workers=1) as c:
            mine, text, _, _ = c.submit(look).result()
            say(mine, repr(text))
            os.environ["MINE"] = "later"  # too late for workers: they start like this process did
            say(c.submit(os.getenv, "MINE").result())
        """,
        MINE="given",
    )
    out, _ = program.end(0)
    assert out.splitlines() == ["given ''", "given"]


def test_processes_are_gone_when_shutdown_returns() -> None:
    out = run_program(
        """
        c = hoplite_mp.Cluster(workers=2)
        list(c.map(abs, range(10)))
        while len(family()) < 5:  # one worker may have run them all
            time.sleep(0.01)
        c.shutdown()
        say(len(family()), threading.active_count())
        """
    )
    assert out.split() == ["0", "1"]


def test_stopping_and_going_on() -> None:
    """A driver under job control is stopped for a while: its cluster waits with it."""
    program = Program(
        """
        with hoplite_mp.Cluster(workers=1) as c:
            say(c.submit(abs, -1).result())
            sys.stdin.readline()
            say(c.submit(abs, -2).result())
        """
    )
    assert program.line() == "1"
    me = psutil.Process(program.process.pid)
    program.signal(signal.SIGSTOP)
    eventually(lambda: me.status() == psutil.STATUS_STOPPED)
    assert all(process.is_running() for process in program.family)
    program.signal(signal.SIGCONT)
    out, _ = program.process.communicate("go\n", timeout=PATIENCE_S)
    assert out.strip() == "2"
    gone(program.family)


def test_ctrl_c_inside_a_with_block_ends_everything() -> None:
    program = Program(
        """
        with hoplite_mp.Cluster(workers=2) as c:
            futures = [c.submit(time.sleep, 600) for _ in range(4)]
            while not futures[0].running(): time.sleep(0.001)
            say("ready")
            futures[0].result()
        """
    )
    assert program.line() == "ready"
    program.signal(signal.SIGINT)
    _, err = program.end(None)
    assert "KeyboardInterrupt" in err
