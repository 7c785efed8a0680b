"""Modules that travel by value: registered ones, and those that only the program can import."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import run_program

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
state = "as in the file"
tried = 0
class Error(Exception):
    pass
class Kind:
    def __init__(self, *_): self.state = state
    def look(self): return self.state
class Actor:
    def look(self): return state
def look(*_): return state
def set_seen(): global seen; seen = state
def look_seen(): return seen
def fail_once():
    global tried
    tried += 1
    if tried == 1:
        raise Error
    return state
"""

# Each way in which a function or class is sent, and gives the module's `state`.
WAYS = {
    "submit": "c.submit(m.look).result()",
    "map": "list(c.map(m.look, [0]))[0]",
    "chunks": "list(c.map(m.look, range(4), chunksize=2))[0]",
    "partial": "c.submit(functools.partial(m.look, 1)).result()",
    "class": "c.submit(m.Kind).result().state",
    "instance": "c.submit(m.Kind().look).result()",
    "argument": "c.submit(call, m.look).result()",
    "actor": "c.actor(m.Actor).look().result()",
    "retried": "c.options(retry_exceptions=(m.Error,)).submit(m.fail_once).result()",
    "spmd": "c.spmd(m.look, 1)[0].result()",
    "run": "list(c.run(m.look).values())[0]",
    "executor": "in_executor()",
    "global function": "c.submit(by_function).result()",
    "global class": "c.submit(by_class).result()",
    "global module": "c.submit(by_module).result()",
    "nested": "c.submit(nested).result()",
}
BEGIN = """
import functools, importlib, importlib.abc, importlib.util, runpy
def call(f): return f()
def in_executor():
    with c.executor(1, initializer=m.set_seen) as ex:
        return ex.submit(m.look_seen).result()
def by_function(): return look()
def by_class(): return Kind().state
def by_module(): return m.look()
def nested(): return hoplite_mp.current().submit(m.look).result()
def ways():
    return {
        WAYS
    }
""".replace("WAYS", ", ".join(f"{name!r}: {way}" for name, way in WAYS.items()))


def program(body: str, cwd: Path) -> str:
    return run_program(BEGIN + textwrap.dedent(body), cwd=cwd)


def test_module_registered_after_its_functions_were_sent_travels_by_value(tmp_path: Path) -> None:
    (tmp_path / "m_on_path.py").write_text(MODULE)
    out = program(
        """
        import m_on_path as m
        from m_on_path import look, Kind
        c = hoplite_mp.Cluster(workers=1)
        say(set(ways().values()))
        hoplite_mp.register_pickle_by_value(m)
        m.state = "as in the program"
        say({way: found for way, found in ways().items() if found != m.state})
        m.state = "changed"
        say({way: found for way, found in ways().items() if found != m.state})
        c.shutdown()
        """,
        tmp_path,
    )
    assert out.splitlines() == ["{'as in the file'}", "{}", "{}"]


def test_other_module_registered_leaves_functions_sent_by_name(tmp_path: Path) -> None:
    (tmp_path / "m_on_path.py").write_text(MODULE)
    (tmp_path / "other.py").write_text("")
    out = program(
        """
        import m_on_path as m, other
        c = hoplite_mp.Cluster(workers=1)
        say(c.submit(m.look).result())
        hoplite_mp.register_pickle_by_value(other)
        m.state = "as in the program"
        known = c._runtime.submitter._functions._known
        for _ in range(2):
            say(c.submit(m.look).result(), known[m.look][False, (), False].reads)
        c.shutdown()
        """,
        tmp_path,
    )
    assert out.splitlines() == ["as in the file"] + ["as in the file []"] * 2


# Ways to make a module that workers cannot import; `source` is its text, `path` a file with it.
MAKES = {
    "a file at another place": """
        spec = importlib.util.spec_from_file_location("plugin", path)
        m = importlib.util.module_from_spec(spec)
        sys.modules["plugin"] = m
        spec.loader.exec_module(m)
        """,
    "a file at another place with the name of one on the path": """
        spec = importlib.util.spec_from_file_location("m_on_path", path)
        m = importlib.util.module_from_spec(spec)
        sys.modules["m_on_path"] = m
        spec.loader.exec_module(m)
        """,
    "memory": """
        m = sys.modules["in_memory"] = types.ModuleType("in_memory")
        exec(source, m.__dict__)
        m.itself = m
        """,
    "a package of a finder of the program": """
        class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "virtual":
                    return importlib.util.spec_from_loader(name, self, is_package=name == "virtual")
            def exec_module(self, module):
                if module.__name__ != "virtual": exec(source, module.__dict__)
        sys.meta_path.insert(0, Finder())
        import virtual.sub as m
        """,
    "a module of a package in memory": """
        package = sys.modules["in_memory"] = types.ModuleType("in_memory")
        package.__path__ = []
        m = package.sub = sys.modules["in_memory.sub"] = types.ModuleType("in_memory.sub")
        exec(source, m.__dict__)
        """,
    "a script that was run": """
        m = types.SimpleNamespace(**runpy.run_path(path))
        """,
}


HELP = "import types\ndef fail_with(error): raise error"


@pytest.mark.parametrize("made", MAKES)
def test_module_that_only_the_program_has_imported_travels_by_value(
    made: str, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "plugin.py").write_text(MODULE)
    (tmp_path / "m_on_path.py").write_text("state = 'in the wrong file'\n" + MODULE)
    out = program(
        textwrap.dedent(
            """
        HELP
        path = "elsewhere/plugin.py"
        source = open(path).read()
        MAKE
        look, Kind = m.look, m.Kind
        c = hoplite_mp.Cluster(workers=1)
        say(m.state, {way: found for way, found in ways().items() if found != m.state})
        if isinstance(m, types.ModuleType):
            m.state = "as in the program"
        say({way: found for way, found in ways().items() if found != m.state})
        made = c.submit(Kind).result()
        try: c.submit(fail_with, m.Error).result()
        except m.Error as error: say(type(made) is Kind, type(error) is m.Error)
        c.shutdown()
        """
        )
        .replace("MAKE", textwrap.dedent(MAKES[made]).strip())
        .replace("HELP", HELP),
        tmp_path,
    )
    assert out.splitlines() == ["as in the file {}", "{}", "True True"]


# As MAKES, with the cluster `c`.
LATE = {
    "a path added after the start": """
        c = hoplite_mp.Cluster(workers=1)
        sys.path.insert(0, "elsewhere")
        import plugin as m
        """,
    "a package of a late path": """
        c = hoplite_mp.Cluster(workers=1)
        sys.path.insert(0, "elsewhere")
        import package.plugin as m
        """,
    "a package without a file of a late path": """
        c = hoplite_mp.Cluster(workers=1)
        sys.path.insert(0, "elsewhere")
        import space.plugin as m
        """,
    "a late part of a package without a file": """
        import parts.known
        c = hoplite_mp.Cluster(workers=1)
        say(c.submit(parts.known.look).result())
        sys.path.insert(0, "elsewhere")
        import parts.plugin as m
        """,
    "a late zip": """
        import shutil
        c = hoplite_mp.Cluster(workers=1)
        sys.path.insert(0, shutil.make_archive("zipped", "zip", "elsewhere"))
        import plugin as m
        """,
    "a path removed before the next start": """
        sys.path.insert(0, "elsewhere")
        import plugin as m
        with hoplite_mp.Cluster(workers=1) as c: say(c.submit(m.look).result())
        sys.path.remove("elsewhere")
        c = hoplite_mp.Cluster(workers=1)
        """,
    "a relative path, and another directory before the start": """
        sys.path.insert(0, "elsewhere")
        import plugin as m
        os.chdir("/")
        c = hoplite_mp.Cluster(workers=1)
        """,
}


@pytest.mark.parametrize("made", LATE)
def test_module_that_is_not_on_the_path_of_the_workers_travels_by_value(
    made: str, tmp_path: Path
) -> None:
    for name in ("plugin", "package/__init__", "package/plugin", "space/plugin", "parts/plugin"):
        path = tmp_path / "elsewhere" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(MODULE)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "known.py").write_text(MODULE)
    out = program(
        textwrap.dedent(
            """
        import types
        MAKE
        look, Kind = m.look, m.Kind
        say({way: found for way, found in ways().items() if found != m.state})
        say(type(c.submit(Kind).result()) is Kind)
        c.shutdown()
        """
        ).replace("MAKE", textwrap.dedent(LATE[made]).strip()),
        tmp_path,
    )
    assert [line for line in out.splitlines() if line != "as in the file"] == ["{}", "True"]


def test_relative_path_is_that_of_the_start_for_workers(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "plugin.py").write_text(MODULE)
    out = program(
        """
        sys.path.insert(0, "elsewhere")
        import plugin as m
        c = hoplite_mp.Cluster(workers=1)
        c.submit(os.chdir, "/").result()
        os.chdir("/")
        say(c.submit(m.look).result())
        m.state = "as in the program"
        say(c.submit(m.look).result())
        c.shutdown()
        """,
        tmp_path,
    )
    assert out.splitlines() == ["as in the file"] * 2  # by name


def test_module_filled_by_assignment_travels_by_value(tmp_path: Path) -> None:
    out = program(
        """
        import types
        cfg = sys.modules["cfg"] = types.ModuleType("cfg")
        cfg.X = 1
        def get(): return cfg.X
        c = hoplite_mp.Cluster(workers=1)
        say(c.submit(get).result())
        cfg.X = 2
        say(c.submit(get).result(), c.submit(getattr, cfg, "X").result())
        c.shutdown()
        """,
        tmp_path,
    )
    assert out.splitlines() == ["1", "2 2"]


def test_script_that_runs_under_a_name_sends_its_functions_by_value(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        MODULE + "import hoplite_mp\n"
        "with hoplite_mp.Cluster(workers=1) as c:\n"
        "    print(c.submit(look).result(), c.submit(Kind).result().state, flush=True)\n"
    )
    assert program("runpy.run_path('job.py', run_name='a job')", tmp_path) == (
        "as in the file as in the file\n"
    )


def test_modules_that_readers_can_import_travel_by_name(tmp_path: Path) -> None:
    (tmp_path / "parts" / "inner").mkdir(parents=True)
    (tmp_path / "parts" / "inner" / "part.py").write_text(MODULE)
    (tmp_path / "m_on_path.py").write_text(MODULE)
    out = program(
        """
        import collections.abc, json.decoder, os.path, xml.etree.ElementTree, numpy.linalg, psutil
        import m_on_path, parts.inner.part
        from hoplite_mp._serialize.code import module_travels
        import hoplite_mp._client.functions, typing, builtins, _io, cloudpickle, pytest
        names = [name for name in list(sys.modules) if not module_travels(name)]
        say(sorted(name for name in names if not name.startswith("six.")))
        """,
        tmp_path,
    )
    assert out.strip() == "['__main__']"


def test_pytest_with_import_mode_importlib_sends_test_functions(tmp_path: Path) -> None:
    below = tmp_path / "deep"
    below.mkdir()
    (below / "test_it.py").write_text(
        MODULE + "import hoplite_mp\n"
        "def test_it():\n"
        "    with hoplite_mp.Cluster(workers=1) as c:\n"
        "        assert c.submit(look).result() == c.submit(Kind).result().state == state\n"
        "        assert type(c.submit(Kind).result()) is Kind\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import pytest; raise SystemExit(pytest.main())",
         "-p", "no:cacheprovider"],
        cwd=below, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTEST_ADDOPTS": "--import-mode=importlib -c /dev/null test_it.py",
             "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
