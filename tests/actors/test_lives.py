"""How actors end, and begin again: handles, close, kill, names, deaths of their processes."""

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hoplite_mp
from hoplite_mp import Actor, ActorLostError, WorkerLostError
from tests.support.functions import Counter, MadeWhen
from tests.support.waiting import eventually


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_ends_with_its_last_handle_after_the_calls_made(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    pid = counter.pid().result(20)
    counter.wait(0.1)
    last = counter.add(7)
    del counter
    assert last.result(20) == 7
    eventually(lambda: _gone(pid))


def test_it_ends_with_its_last_handle_while_a_call_waits_for_its_argument(
    c: hoplite_mp.Cluster,
) -> None:
    counter = c.actor(Counter)
    last = counter.add(c.submit(_slow, 5))
    del counter
    assert last.result(20) == 5


def _slow(x: Any) -> Any:
    time.sleep(0.1)
    return x


def _keep(handle: Any, seconds: float) -> int:
    time.sleep(seconds)
    return int(handle.add().result(20))


def test_a_task_that_has_a_handle_keeps_it(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter, 1)
    pid = counter.pid().result(20)
    future = c.submit(_keep, counter, 0.1)
    del counter
    assert future.result(20) == 2
    del future
    eventually(lambda: _gone(pid))


def test_a_handle_in_an_object_keeps_it(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter, 1)
    ref = c.put({"handle": counter})
    pid = counter.pid().result(20)
    del counter
    assert c.get(ref)["handle"].add().result(20) == 2
    del ref
    eventually(lambda: _gone(pid))


def test_close_finishes_what_was_called_and_refuses_the_rest(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    counter.wait(0.1)
    before = counter.add()
    held = counter.add(c.submit(_slow, 10))
    Actor.close(counter)
    after = counter.add()
    assert before.result(20) == 1
    assert held.result(20) == 11
    with pytest.raises(ActorLostError, match="actor Counter was closed"):
        after.result(20)
    Actor.close(counter)


def test_kill_ends_it_now(c: hoplite_mp.Cluster) -> None:
    counter = c.options(restarts=5).actor(Counter)
    pid = counter.pid().result(20)
    running, waiting = counter.wait(30), counter.add()
    eventually(running.running)
    Actor.kill(counter)
    for future in (running, waiting, counter.add()):
        with pytest.raises(ActorLostError):
            future.result(20)
    eventually(lambda: _gone(pid))


def test_its_state_is_never_lost_in_silence(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    pid = counter.pid().result(20)
    running, waiting = counter.wait(30), counter.add()
    eventually(running.running)
    os.kill(pid, signal.SIGKILL)
    for future in (running, waiting, counter.add()):
        with pytest.raises(
            ActorLostError,
            match=r"^actor Counter has lost its state.*SIGKILL.*"
            r"\. With options\(restarts=\) it would be restarted$",
        ):
            future.result(20)
    with pytest.raises(WorkerLostError):
        counter.add().result(20)


def test_a_process_that_ends_itself(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    with pytest.raises(ActorLostError, match="exit code 3"):
        counter.end(3).result(20)
    other = c.actor(Counter)
    with pytest.raises(ActorLostError, match="exit code 0"):
        other.end(0).result(20)


def test_a_restart_begins_anew_and_goes_on_with_what_had_not_begun(
    c: hoplite_mp.Cluster,
) -> None:
    counter = c.options(restarts=1).actor(Counter, 100)
    pid = counter.pid().result(20)
    counter.add().result(20)
    running = counter.wait(30)
    waiting = [counter.note(i) for i in range(50)]
    eventually(running.running)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorLostError, match=r"the actor restarts \(restart 1 of 1\)$"):
        running.result(20)
    assert [one.result(20) for one in waiting] == list(range(1, 51))
    assert counter.notes().result(20) == list(range(50))
    assert counter.add().result(20) == 101
    assert Actor.restarts(counter) == 1
    os.kill(counter.pid().result(20), signal.SIGKILL)
    with pytest.raises(
        ActorLostError, match=r"Its restarts are used up \(options\(restarts=1\)\)$"
    ):
        counter.add().result(20)


def test_a_call_with_retries_is_tried_again_first(c: hoplite_mp.Cluster, tmp_path: Path) -> None:
    counter = c.options(restarts=1, retries=1).actor(Counter)
    pid = counter.pid().result(20)
    running = counter.wait_for(str(tmp_path / "go"))
    waiting = counter.note("later")
    eventually(running.running)
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert running.result(20) == "waited"
    assert waiting.result(20) == 1


def test_names(c: hoplite_mp.Cluster) -> None:
    counter = c.options(name="the counter").actor(Counter, 3)
    assert c.get_actor("the counter") == counter
    assert c.get_actor("the counter").add().result(20) == 4
    assert c.submit(_by_name, "the counter").result(20) == 5
    with pytest.raises(ValueError, match=r"there is an actor named 'the counter' already"):
        c.options(name="the counter").actor(Counter)
    same = c.options(name="the counter", get_if_exists=True).actor(Counter, 99)
    assert same == counter
    assert same.add().result(20) == 6
    Actor.close(counter)
    with pytest.raises(LookupError, match="no actor named 'the counter'"):
        c.get_actor("the counter")
    again = c.options(name="the counter").actor(Counter, 50)
    assert again.add().result(20) == 51


def _by_name(name: str) -> Any:
    return hoplite_mp.current().get_actor(name).add().result(20)


def test_who_finds_a_name_taken_leaves_nothing_behind(c: hoplite_mp.Cluster) -> None:
    taken = c.options(name="taken").actor(Counter)
    assert taken.add().result(20) == 1
    before = c.stats()["objects"]
    for _ in range(50):
        assert c.options(name="taken", get_if_exists=True).actor(Counter) == taken
        with pytest.raises(ValueError, match="already"):
            c.options(name="taken").actor(Counter)
    eventually(lambda: c.stats()["objects"] <= before)


def test_two_threads_open_actors_at_once(
    c: hoplite_mp.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is delayed between the node's answer and its own hold on the identity."""
    memory, delayed, other_done = c._runtime.memory, threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def hold(self, *args: Any) -> Any:
            if threading.current_thread() is first and not delayed.is_set():
                delayed.set()
                other_done.wait(0.3)  # it may have to wait for this one
            return client.hold(*args)

    client = memory.client
    monkeypatch.setattr(memory, "client", Slow())
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(c.actor(Counter, 5).add().result(20)))
    first.start()
    assert delayed.wait(20)
    assert c.actor(Counter, 7).add().result(20) == 8
    other_done.set()
    first.join(30)
    assert found == [6]


def test_a_detached_one_lives_without_handles(c: hoplite_mp.Cluster) -> None:
    c.options(name="alone", detached=True).actor(Counter, 1).add().result(20)
    time.sleep(0.05)
    assert c.get_actor("alone").add().result(20) == 3
    Actor.kill(c.get_actor("alone"))
    with pytest.raises(LookupError):
        c.get_actor("alone")


def test_one_that_dies_while_it_is_made(c: hoplite_mp.Cluster, tmp_path: Path) -> None:
    slow = c.options(restarts=1).actor(MadeWhen, str(tmp_path / "go"))
    future = slow.add()
    eventually((tmp_path / "go.here").exists)
    os.kill(int((tmp_path / "go.here").read_text()), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert future.result(20) == 1
    assert Actor.restarts(slow) == 1


def test_many_of_them(c: hoplite_mp.Cluster) -> None:
    for _ in range(3):
        handles = [c.actor(Counter, i) for i in range(10)]
        assert [h.add().result(60) for h in handles] == list(range(1, 11))
        del handles


def test_the_cluster_ends_while_actors_live() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        handles = [c.actor(Counter, i) for i in range(2)]
        futures = [h.wait(0.2) for h in handles]
    assert [f.result() for f in futures] == ["waited"] * 2
    with pytest.raises(hoplite_mp.ClosedError):
        handles[0].add()


def test_a_handle_holds_its_cluster() -> None:
    handle = hoplite_mp.Cluster(workers=1).actor(Counter, 1)
    gc.collect()
    assert handle.add().result(20) == 2
    pid = handle.pid().result(20)
    del handle
    gc.collect()
    eventually(lambda: _gone(pid))


def test_an_identity_that_nobody_became_is_no_actor(c: hoplite_mp.Cluster) -> None:
    """Who asked for the name a moment ago was given it, and could not begin: what the node leaves
    under the identity says so to those who have found it meanwhile."""
    nobody = c.put(None)
    assert c._runtime.actors._known(nobody._hold) is None


@pytest.mark.parametrize("name", ["close", "kill", "restarts"])
def test_handle_without_a_method_of_actor_names_it(c: hoplite_mp.Cluster, name: str) -> None:
    handle = c.actor(type("Kind", (), {"five": lambda self: 5}))
    with pytest.raises(AttributeError, match=rf"call hoplite_mp\.Actor\.{name}\(handle\)"):
        getattr(handle, name)
    Actor.close(handle)


def test_a_class_with_a_long_name(c: hoplite_mp.Cluster) -> None:
    kind = type("K" * 5000, (), {"five": lambda self: 5})
    actor = c.options(restarts=1).actor(kind)
    assert actor.five().result(30) == 5
    with pytest.raises(AttributeError, match=r"^K+ \[\.\.\.\] K+ has no method"):
        actor.six()


def test_a_class_with_too_many_methods(c: hoplite_mp.Cluster) -> None:
    kind = type("Kind", (), {f"{at:0>40}": len for at in range(10_000)})
    with pytest.raises(
        ValueError, match=r"actor Kind has 10000 .* maximum is 262144.* fewer methods"
    ):
        c.actor(kind)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 1025, "an actor's name has 1025 characters: at most 1024"),
        ("\udce9", "surrogates"),
    ],
    ids=["long", "surrogates"],
)
def test_names_that_cannot_travel(c: hoplite_mp.Cluster, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        c.options(name=name).actor(list)
    with pytest.raises(ValueError, match=why):
        c.get_actor(name)
    if name != "x" * 1025:
        with pytest.raises(ValueError, match="a group's name must be encodable as UTF-8"):
            c.group(name, 1)


class Marked:
    """Leaves a file where it was made."""

    def __init__(self, path: str) -> None:
        Path(path).touch()
        self._path = path

    def path(self) -> str:
        return self._path


def test_the_constructor_of_one_that_was_killed_while_it_waited_never_runs(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1, resources={"gpu": 1}) as c:
        gpu = c.options(resources={"gpu": 1})
        first = gpu.actor(Marked, str(tmp_path / "first"))
        assert first.path().result(20) == str(tmp_path / "first")
        second = gpu.actor(Marked, str(tmp_path / "second"))  # waits for the resource
        Actor.kill(second)
        with pytest.raises(ActorLostError, match=r"ended by Actor\.kill"):
            second.path().result(20)
        Actor.kill(first)
        third = gpu.actor(Marked, str(tmp_path / "third"))
        assert third.path().result(20) == str(tmp_path / "third")
        assert not (tmp_path / "second").exists()
