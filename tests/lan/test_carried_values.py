"""Globals that workers of another host set, and modules that only the program has imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster

PROGRAM = """
import threading, types
mark, large = None, np.zeros(1 << 17)
def set_to(v):
    global mark, large
    mark, large = v, large + v
def look(): return mark, float(large[-1])
class Actor:
    def __init__(self, v): set_to(v)
    def call(self, f): return f()
far, barrier, wrong = c.options(node=there), threading.Barrier(4), []
def run(v):
    barrier.wait()
    with c.executor(1, initializer=set_to, initargs=(v,), node=there) as ex:
        found = [ex.submit(look).result() for _ in range(2)]
    actor = far.actor(Actor, v)
    found += [actor.call(look).result() for _ in range(2)]
    wrong.extend(one for one in found if one != (v, float(v)))
threads = [threading.Thread(target=run, args=(v,)) for v in range(1, 5)]
for one in threads: one.start()
for one in threads: one.join()
assert not wrong, wrong

plugin = sys.modules["plugin"] = types.ModuleType("plugin")
exec("state = 1\\nclass Kind: pass\\ndef look(): return state", plugin.__dict__)
def by_module(): return plugin.look()
assert [far.submit(f).result() for f in (plugin.look, by_module)] == [1, 1]
plugin.state = 2
assert [far.submit(f).result() for f in (plugin.look, by_module)] == [2, 2]
assert type(far.submit(plugin.Kind).result()) is plugin.Kind
print("right")
"""


def test_values_that_functions_carry_to_another_host_are_right(
    cluster: UpCluster, lan: Lan
) -> None:
    assert cluster.run(lan[0], WAIT_FOR_ALL + PROGRAM).splitlines()[-1:] == ["right"]
