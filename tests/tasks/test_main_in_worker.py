# ruff: noqa: E501 (programs)
"""`__main__` in a worker: what code in tasks finds there by name, as in the standard pool."""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _serialize
from hoplite_mp._serialize import mains
from tests.support.processes import run_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What a script defines, and tasks that reach it by name.
DEFINED = '''
from __future__ import annotations
import copy, dataclasses, enum, functools, inspect, io, os, pickle, sys, typing
from collections import namedtuple
from dataclasses import InitVar
from typing import ClassVar, Optional

class Color(enum.Enum):
    RED = 1
    BLUE = 2
@dataclasses.dataclass
class Config:
    """What a task needs."""
    rate: float = 0.1
    next: Optional[Config] = None
    color: Color = Color.RED
    shared: ClassVar[int] = 3
class Outer:
    class Inner:
        def __init__(self): self.n = 5
class Failure(Exception):
    def __init__(self, code): super().__init__(code); self.code = code
Point = namedtuple("Point", "x")
CONSTANT = 7
def helper(x):
    return x + 1
@functools.lru_cache
def cached(x): return x * 2

def t_objects():
    values = [Config(2.0), Outer.Inner(), Failure(4), Point(6)]
    back = pickle.loads(pickle.dumps(values))
    return [type(a) is type(b) for a, b in zip(values, back)], back[0], back[1].n, back[2].code
def t_identity():
    loaded = pickle.loads(pickle.dumps([Color.RED, helper, Config, cached]))
    return loaded[0] is Color.RED, loaded[1] is helper, loaded[2] is Config, loaded[3] is cached
def t_files():
    import joblib, tempfile
    with tempfile.TemporaryDirectory() as folder:
        joblib.dump(Config(3.0), folder + "/file")
        with open(folder + "/pickle", "wb") as file: pickle.dump(Config(4.0), file)
        with open(folder + "/pickle", "rb") as file: loaded = pickle.load(file)
        return joblib.load(folder + "/file").rate, loaded.rate, len(joblib.hash(Config()))
def t_hints():
    def local(c: Config, p: "Point") -> Color: ...
    return [sorted(map(str, typing.get_type_hints(f).items())) for f in (Config, local, annotated)]
def annotated(c: Optional[Color]) -> typing.Union[Config, None]: ...
def t_dataclass():
    @dataclasses.dataclass
    class Local:
        a: int
        b: typing.ClassVar[int] = 3
        c: ClassVar[int] = 4
        d: dataclasses.InitVar[int] = 5
        e: InitVar[int] = 6
        def __post_init__(self, d, e): self.sum = d + e
    return [f.name for f in dataclasses.fields(Local)], Local(1).sum
def t_source():
    return inspect.getsource(helper), inspect.getsource(Config.__class__ and Outer)
def t_import():
    import __main__
    return __main__.CONSTANT, __main__.helper(1), sys.modules["__main__"].Point(2)
def t_names():
    return Config.__module__, __name__, os.path.basename(__file__), sys.modules["__main__"].__spec__
def t_copies(): return copy.copy(Color.RED) is Color.RED, copy.deepcopy(Config(5.0))
def t_pool():
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(helper, [1, 2]), pool.apply(Config, (6.0,)), pool.apply(type, (Color.BLUE,))
def t_executor():
    import multiprocessing, concurrent.futures
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork, initializer=helper, initargs=(1,)) as pool:
        return list(pool.map(helper, [1, 2])), pool.submit(copy.copy, Config(7.0)).result()
tests = {name: one for name, one in list(globals().items()) if name.startswith("t_")}
def outcome(call):
    try: return repr(call())
    except BaseException as error: return f"{type(error).__name__}: {error}"
def all_of_them(): return {name: outcome(test) for name, test in tests.items()}
'''

STANDARD = """
import concurrent.futures, hoplite_mp, multiprocessing
fork = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
    expected = pool.submit(all_of_them).result(60)
def compare(what, found):
    differ = {name: (expected[name], found[name]) for name in tests if expected[name] != found[name]}
    print(what, differ or "same")
"""

EACH = """
with hoplite_mp.Cluster(1) as c:
    for name, test in tests.items():
        found = outcome(lambda: c.submit(test).result(60))
        if found != expected[name]: print(name, found, "instead of", expected[name])
    print("each")
"""


def test_main_in_task_is_as_in_standard_pool(tmp_path: Path) -> None:
    assert run_script(tmp_path, DEFINED + STANDARD + EACH).splitlines() == ["each"]


EVERYWHERE = """
QUICK = "t_objects", "t_identity", "t_hints", "t_dataclass", "t_source", "t_import"
tests = {name: tests[name] for name in QUICK}
async def a(): return all_of_them()
def items(): yield all_of_them()
class Actor:
    def run(self): return all_of_them()
class AsyncActor:
    async def run(self): return all_of_them()
found = None
def init():
    global found
    found = all_of_them()
def initialized(): return found
def inner(): return hoplite_mp.current().submit(all_of_them).result()
with hoplite_mp.Cluster(1) as c:
    compare("submit", c.submit(all_of_them).result())
    compare("async", c.submit(a).result())
    compare("stream", c.get(list(c.stream(items))[0]))
    compare("actor", c.actor(Actor).run().result())
    compare("async actor", c.actor(AsyncActor).run().result())
    compare("run", list(c.run(all_of_them).values())[0])
    compare("nested", c.submit(inner).result())
    compare("map", list(c.map(lambda _: all_of_them(), [1]))[0])
    with c.executor(1, initializer=init) as ex:
        compare("initializer", ex.submit(initialized).result())
        compare("executor", ex.submit(all_of_them).result())
    compare("spmd", c.get(c.spmd(lambda g: all_of_them(), 1)[0]))
with hoplite_mp.Executor(1) as ex:
    compare("Executor", ex.submit(all_of_them).result())
"""


def test_main_is_there_in_every_kind_of_task(tmp_path: Path) -> None:
    out = run_script(tmp_path, DEFINED + STANDARD + EVERYWHERE)
    different = [line for line in out.splitlines() if not line.endswith(" same")]
    assert not different
    assert len(out.splitlines()) == 12


ARGUMENTS = """
import hoplite_mp, pickle, dataclasses, enum, multiprocessing, functools
@dataclasses.dataclass
class Config: rate: float = 0.1
class Color(enum.Enum): RED = 1
def helper(x): return x + 1
class Outer:
    class Inner: pass
class Model:
    def step(self): return len(pickle.dumps(self)) > 0
def dump_own(): return pickle.loads(pickle.dumps(dump_own)) is dump_own
def same(dumped, value): return type(pickle.loads(dumped)) is type(value)
with hoplite_mp.Cluster(1) as c:
    # The functions are importable: only the arguments bring what the script defines.
    print(c.submit(pickle.dumps, Config(2.0)).result() == pickle.dumps(Config(2.0)))
    print(c.submit(pickle.loads, pickle.dumps(Config(3.0))).result())
    print(c.submit(pickle.loads, c.submit(pickle.dumps, Color.RED)).result() is Color.RED)
    print(type(c.submit(pickle.loads, c.submit(pickle.dumps, [Outer.Inner()])).result()[0]))
    print(c.submit(pickle.dumps, helper).result() == pickle.dumps(helper))
with hoplite_mp.Cluster(1) as c:
    print(c.submit(Model().step).result(), c.submit(dump_own).result())
    ref = c.put(Config(1.0))
    print(c.submit(pickle.dumps, ref).result() == pickle.dumps(Config(1.0)))
with hoplite_mp.Cluster(1) as c:
    try: c.submit(pickle.loads, pickle.dumps(Config())).result()
    except AttributeError as error: print("definitions that arrived" in str(error))
"""


def test_arguments_and_own_function_are_found_in_main(tmp_path: Path) -> None:
    assert run_script(tmp_path, ARGUMENTS).splitlines() == [
        "True",
        "Config(rate=3.0)",
        "True",
        "<class '__main__.Outer.Inner'>",
        "True",
        "True True",
        "True",
        "True",
    ]


SPAWNED = """
import concurrent.futures, hoplite_mp, math, multiprocessing, sys
print("runs")
def helper(x): return x + 1
class Config: pass
def pool(method):
    with multiprocessing.get_context(method).Pool(1) as pool: return pool.map_async(helper, [1]).get(60)
def initialized(method):
    with multiprocessing.get_context(method).Pool(1, initializer=helper, initargs=(1,)) as pool: return pool.map(math.sqrt, [4])
def executor(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool: return pool.submit(helper, 1).result(60)
def argument(method):
    with multiprocessing.get_context(method).Pool(1) as pool: return pool.map_async(id, [Config()]).get(60)
def process(method):
    process = multiprocessing.get_context(method).Process(target=helper, args=(1,))
    process.start()
def importable(method):
    with multiprocessing.get_context(method).Pool(1) as pool: return pool.map_async(math.sqrt, [4]).get(60)
def forked(method):
    return pool("fork"), importable(method), pool("fork")
def beside(method):
    fork, other = map(multiprocessing.get_context, ("fork", method))
    with other.Pool(1) as pool, concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as ex, fork.Pool(1) as forks:
        found = [forks.map_async(helper, [1]).get(60), ex.submit(helper, 1).result(60), pool.map_async(math.sqrt, [4]).get(60)]
        try: pool.map_async(helper, [1]).get(60)
        except TypeError: return found
def tell(c, call, method):
    try: print(method, call.__name__, c.submit(call, method).result(100))
    except TypeError as error: print(method, call.__name__, str(error).partition(" ")[0], "get_context('fork')" in str(error))
c = hoplite_mp.Cluster(1)  # no guard
for method in sys.argv[1:] or ("spawn", "forkserver"):
    for call in (pool, initialized, executor, argument, process, importable, forked, beside):
        tell(c, call, method)
c.shutdown()
"""


def test_spawned_children_of_tasks_refuse_definitions_of_the_script(tmp_path: Path) -> None:
    assert run_script(tmp_path, SPAWNED).splitlines() == [
        "runs",
        *[
            f"{method} {line}"
            for method in ("spawn", "forkserver")
            for line in (
                "pool helper True",
                "initialized helper True",
                "executor helper True",
                "argument Config True",
                "process helper True",
                "importable [2.0]",
                "forked ([2], [2.0], [2])",
                "beside [[2], 2, [2.0]]",
            )
        ],
    ]


MP_MAIN = """
import multiprocessing, pickle, sys
class Config: pass
def by_name(): return type(pickle.loads(pickle.dumps(Config()))) is Config, __name__, Config.__module__
def child():
    import hoplite_mp
    with hoplite_mp.Cluster(1) as c: print(c.submit(by_name).result(), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""


def test_driver_that_was_spawned_has_its_main_in_workers(tmp_path: Path) -> None:
    assert run_script(tmp_path, MP_MAIN) == "(True, '__mp_main__', '__mp_main__')\n"


# -- in one process ------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[mains._Mains]:
    """As if this process were a worker."""
    fresh = mains._Mains()
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for module in (mains, _serialize.captured_globals):
        monkeypatch.setattr(module, "mains", fresh)
    mains.begin(1)
    yield fresh
    sys.modules.pop("__mp_main__", None)


def test_each_audience_has_its_own_main(worker: mains._Mains) -> None:
    first, second = mains.Main("__main__"), mains.Main("__mp_main__")
    worker.turn_to(first)
    _serialize.turn_to_output_owner(2)
    assert sys.modules["__main__"] is worker.empty
    worker.turn_to(second)
    assert sys.modules["__main__"] is sys.modules["__mp_main__"] is second
    _serialize.turn_to_output_owner(1)
    assert sys.modules["__main__"] is first
    assert "__mp_main__" not in sys.modules
    for output_owner in range(2, mains.AUDIENCES_MAX + 3):
        _serialize.turn_to_output_owner(output_owner)
        worker.turn_to(second)
    assert len(worker.of_output_owner) == mains.AUDIENCES_MAX
    _serialize.turn_to_output_owner(1)
    assert sys.modules["__main__"] is worker.empty


def test_nested_run_restores_main(worker: mains._Mains) -> None:
    first, second = mains.Main("__main__"), mains.Main("__main__")
    worker.turn_to(first)
    outer = _serialize.begin_run()
    inner = _serialize.begin_run()
    worker.turn_to(second)
    _serialize.end_run(inner)
    assert sys.modules["__main__"] is first
    worker.turn_to(second)
    _serialize.end_run(outer)
    assert sys.modules["__main__"] is second  # until another task begins


def test_main_hides_its_file_except_from_inspect(worker: mains._Mains) -> None:
    main = mains.Main("__main__")
    vars(main)["__file__"] = "/a/script.py"
    assert getattr(main, "__file__", None) is None
    assert main.__spec__ is None
    reader = types.ModuleType("inspect")
    exec("def read(module): return module.__file__", reader.__dict__)
    assert reader.read(main) == "/a/script.py"
    with pytest.raises(AttributeError, match="does not run the script"):
        _ = main.anything
    assert os.path.basename(vars(main)["__file__"]) == "script.py"


def test_hidden_names_are_those_of_annotations_and_of_main() -> None:
    scope = {"typing": types, "Own": int, "number": 3, "os": os}

    def task() -> None:
        class Local:
            a: typing.ClassVar[Own]  # type: ignore  # noqa: F821
            b: number  # type: ignore  # noqa: F821

    def plain() -> str:
        return "typing Own number"

    def by_name() -> object:
        import __main__

        return __main__.number

    assert set(mains.hidden_names(scope, task.__code__, {})) == {"typing", "Own"}
    assert set(mains.hidden_names(scope, plain.__code__, {})) == set()
    assert set(mains.hidden_names(scope, plain.__code__, {"x": "Own | os.x"})) == {"Own", "os"}
    assert set(mains.hidden_names(scope, by_name.__code__, {})) == {"number"}
