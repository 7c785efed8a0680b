"""Modules whose functions and classes travel by value: registered ones, those of one program."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.tasks.helpers import run

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
    return run(BEGIN + textwrap.dedent(body), cwd=cwd)


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
            say(c.submit(m.look).result(), known[m.look][1])
        c.shutdown()
        """,
        tmp_path,
    )
    assert out.splitlines() == ["as in the file"] + ["as in the file []"] * 2
