"""`__main__` and classes of a script in workers of another host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster

PROGRAM = """
import dataclasses, enum, functools, pickle, multiprocessing, typing
class Color(enum.Enum):
    RED = (1, "r")
    CRIMSON = (1, "r")
    def __init__(self, number, letter): self.letter = letter
class Perm(enum.Flag):
    R = 1
    W = 2
    RW = 3
@dataclasses.dataclass(slots=True)
class Config:
    rate: "typing.ClassVar[float]" = 0.5
    color: Color = Color.RED
class Hooked:
    def __init_subclass__(cls, key): cls.key = key
class Child(Hooked, key="k"):
    __slots__ = "__p"
    def __init__(self): self.__p = 6
    @functools.singledispatchmethod
    def get(self, x): return self.__p
class Cached:
    @functools.cached_property
    def value(self): return 8
def helper(x): return x + 1
def by_name(config):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        mapped = pool.map(helper, [1, 2])
    loaded = pickle.loads(pickle.dumps([config, Color.CRIMSON, helper]))
    return (
        loaded[0], loaded[1] is Color.RED, loaded[2] is helper, mapped, Color.CRIMSON.letter,
        Perm.R | Perm.W, hasattr(config, "__dict__"), Child().get(1), Child.key, Cached().value,
        [f.name for f in dataclasses.fields(Config)], os.uname().nodename,
    )
far = c.options(node=there)
found = far.submit(by_name, Config()).result()
assert found == (
    Config(), True, True, [2, 3], "r", Perm.RW, False, 6, "k", 8, ["color"], "h3"
), found
assert type(found[0]) is Config and found[5] is Perm.RW and found[0].color is Color.RED
child = far.submit(Child).result()
assert type(child) is Child and child.get(0) == 6
back = far.submit(pickle.loads, pickle.dumps(Perm.RW)).result()
assert back is Perm.RW
print("same")
"""


def test_script_definitions_on_another_host_are_found_by_name(cluster: UpCluster, lan: Lan) -> None:
    assert cluster.run(lan[0], WAIT_FOR_ALL + PROGRAM).splitlines() == ["same"]
