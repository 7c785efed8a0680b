"""Faults of emulated hosts, and a driver that checks each value meanwhile."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.support.clusters import UpCluster, kill_manager, signal_all

if TYPE_CHECKING:
    from tests.lan import Host, Lan


HOSTS, HOSTS_MAX = 3, 5
RATE = "1gbit"
# A manager that dies ten times within ten seconds is not started again.
MANAGER_DEATHS_MAX = 6
PICKS = st.integers(0, 1 << 16)
COUNTS = st.sampled_from([10, 30_000, 600_000])
LAN_STEPS = st.one_of(
    st.tuples(st.just("put"), PICKS, COUNTS),
    st.tuples(st.just("submit"), PICKS, st.sampled_from(["double", "slow", "fail"])),
    st.tuples(st.just("submit"), PICKS, st.sampled_from(["double", "slow", "fail"])),
    st.tuples(st.just("read"), PICKS),
    st.tuples(st.just("reduce"), PICKS, st.lists(PICKS, min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("allreduce"), PICKS, st.lists(PICKS, min_size=1, max_size=3)),
    st.tuples(st.just("broadcast"), PICKS),
    st.tuples(st.just("group"), st.sampled_from([5, 300_000])),
    st.tuples(st.just("delete"), PICKS),
    st.tuples(st.just("forget"), PICKS),
    st.tuples(st.just("kill_worker"), PICKS),
    st.tuples(st.just("kill_host"), PICKS),
    st.tuples(st.just("stop_host"), PICKS),
    st.tuples(st.just("cut_host"), PICKS),
    st.tuples(st.just("heal")),
    st.tuples(st.just("join")),
    st.tuples(st.just("kill_manager")),
)

LAN_PROGRAM = """
import json, traceback
PATIENCE_S, RETRIES = 60.0, 100
GROUP_S = 15.0  # less than a host that is cut off looks for its cluster
def array_of(seed, count):
    return np.random.default_rng(seed).integers(-1000, 1000, count).astype(np.float64)
def double(array):
    return array * 2
def slow(array):
    time.sleep(0.1)
    return array + 1
def fail(array):
    raise ZeroDivisionError("as it is meant to be")
def member(name, turn, count):
    with hoplite_mp.current().group(name, 2, timeout=GROUP_S) as g:
        got = g.allreduce(np.full(count, turn + 0.25 * g.rank))
        assert got[0] == got[-1] == sum(turn + 0.25 * rank for rank in g.contributors)
        return g.contributors
class Stored:
    def __init__(self, ref, value, above=()):
        self.ref, self.value, self.above, self.deleted = ref, value, above, False
    def may_be_lost(self):
        return self.deleted or any(one.may_be_lost() for one in self.above)
    def get(self):
        try:
            got = c.get(self.ref, timeout=PATIENCE_S)
        except ZeroDivisionError:
            assert self.value is None
        except hoplite_mp.ObjectLostError:
            assert self.may_be_lost()
        else:
            assert self.value is not None and np.array_equal(got, self.value)
stored, groups, turn = [], 0, 0
def alike(first, others):
    return [first] + [
        one for one in (stored[i % len(stored)] for i in others)
        if one.value is not None and not one.may_be_lost() and one.value.shape == first.value.shape
    ]
def step(what, *given):
    global groups, turn
    turn += 1
    if what == "put":
        value = array_of(*given)
        stored.append(Stored(c.put(value), value))
    elif what == "group":
        name = f"g{groups}"  # the next one has it too, if both members came to an end
        tasks = [c.options(retries=0).submit(member, name, turn, given[0]) for _ in range(2)]
        found = set()
        for task in tasks:
            try:
                found.add(task.result(PATIENCE_S))
            except (hoplite_mp.WorkerLostError, hoplite_mp.HopliteTimeoutError):
                groups += 1
        assert len(found) <= 1, found
    elif what == "kill_worker":
        def suicide():
            os.kill(os.getpid(), 9)
        task = c.options(retries=0).submit(suicide)
        try:
            task.result(PATIENCE_S)
        except hoplite_mp.WorkerLostError:
            pass
    elif what in ("there", "end"):  # all who were away have come again, and nothing is lost
        deadline = time.monotonic() + PATIENCE_S
        while sum(n.workers > 0 for n in c.nodes) < given[0]:
            assert time.monotonic() < deadline, c.nodes
            time.sleep(0.02)
        if what == "end":
            for one in stored:
                one.get()
            stored.clear()
    elif stored:
        one = stored[given[0] % len(stored)]
        if what == "read":
            one.get()
        elif what == "delete":
            c.wait([one.ref], timeout=PATIENCE_S)
            c.delete(one.ref)
            one.deleted = True
        elif what == "forget":
            stored.remove(one)
        elif one.may_be_lost():
            pass
        elif what == "submit":
            function = globals()[given[1]]
            value = None
            if one.value is not None and function is not fail:
                value = function(one.value)
            future = c.options(retries=RETRIES).submit(function, one.ref)
            stored.append(Stored(future.ref, value, (one,)))
        elif one.value is None:
            pass
        elif what == "broadcast":
            c.broadcast(one.ref).result(PATIENCE_S)
        elif what in ("reduce", "allreduce"):
            members = alike(one, given[1])
            num = max(1, len(members) - 1) if given[-1] is True else len(members)
            ref = getattr(c, what)([one.ref for one in members], num=num)
            got = c.get(ref, timeout=PATIENCE_S)
            ranks = ref.contributors
            assert num <= len(ranks) <= len(members), ranks
            assert np.array_equal(got, sum(members[i].value for i in ranks))
            stored.append(Stored(ref, np.array(got)))
        else:
            raise AssertionError(what)
while line := sys.stdin.readline():
    try:
        step(*json.loads(line))
    except hoplite_mp.NodeLostError as error:  # said by a broadcast to a host that has just died
        print("ok" if "broadcast" in line else f"{error!r}", flush=True)
    except BaseException:
        print(traceback.format_exc().replace(chr(10), " | "), flush=True)
    else:
        print("ok", flush=True)
"""


class FaultyLan:
    """The hosts besides the first `kept` ones, and what is wrong with them."""

    kept = 1
    most = HOSTS_MAX

    def __init__(self, lan: Lan, cluster: UpCluster) -> None:
        self.lan = lan
        self.cluster = cluster
        self.wrong: dict[int, str] = {}  # number of a host -> stopped or cut
        self.manager_deaths = 0
        self.numbers = len(lan.hosts)

    @property
    def others(self) -> list[Host]:
        return [host for host in self.lan if host.number > self.kept]

    def victim(self, number: int) -> Host | None:
        """One with which nothing is wrong, if it is not the last one."""
        well = [host for host in self.others if host.number not in self.wrong]
        return well[number % len(well)] if len(well) > 1 else None

    def heal(self) -> None:
        for host in self.others:
            how = self.wrong.pop(host.number, "")
            if how == "cut_host":
                host.mend()
            elif how == "stop_host":
                signal_all(host, signal.SIGCONT)

    def join(self) -> None:
        if len(self.lan.hosts) < self.most:
            self.numbers += 1
            host = self.lan.add(self.numbers)
            self.cluster.joined.append(self.cluster.join(host, 1))

    def kill_manager(self) -> None:
        self.manager_deaths += 1
        if self.manager_deaths <= MANAGER_DEATHS_MAX:
            kill_manager(self.lan[0])

    def happen(self, what: str, number: int = 0) -> None:
        if what in ("heal", "join", "kill_manager", "take_over"):
            getattr(self, what)()
            return
        host = self.victim(number)
        if host is None:
            return
        if what == "kill_host":
            host.kill()
        elif what == "cut_host":
            host.cut()
        else:
            signal_all(host, signal.SIGSTOP)
        if what != "kill_host":
            self.wrong[host.number] = what


FEW = 2  # the first one of hypothesis is the simplest
HAPPENS = ("heal", "join", "kill_manager", "kill_host", "cut_host", "stop_host")


def chaos_settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a run is not repeatable
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        derandomize=examples == FEW,
    )
