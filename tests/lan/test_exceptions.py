"""Exceptions that come from another host: their types, exits, members of groups, streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster


def test_exceptions_from_another_host_keep_their_types(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import dataclasses, sys
@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    key: str
class Two(Exception):
    def __init__(self, code, what):
        super().__init__(f"{what} ({code})")
        self.code, self.what = code, what
class ExitsInReduce(Exception):
    def __reduce__(self):
        sys.exit(3)
def fail(make):
    raise make()
def items(make):
    yield 1
    raise make()
def nested(make):
    hoplite_mp.current().options(node=home).submit(fail, make).result()
class Counter:
    count = 0
    def fail(self, make):
        self.count += 1
        raise make()
    def get(self):
        return self.count
home = [n for n in c.nodes if n.host != "h3" and n.workers][0]
far = c.options(node=there)
frozen, exits = lambda: Frozen("k"), lambda: ExitsInReduce("k")
for make in frozen, exits:
    kind = type(make())
    assert type(far.submit(fail, make).exception(60)) is kind
    assert type(far.submit(abs, far.submit(fail, make)).exception(60)) is kind
    assert type(c.options(node=home).submit(abs, far.submit(fail, make)).exception(60)) is kind
    try:
        for ref in far.stream(items, make):
            c.get(ref)
    except kind:
        pass
    actor = far.actor(Counter)
    assert type(actor.fail(make).exception(60)) is kind
    assert actor.get().result(60) == 1
for kind in SystemExit, KeyboardInterrupt, GeneratorExit:
    error = far.submit(fail, kind).exception(60)
    assert type(error) is hoplite_mp.TaskError and type(error.__cause__) is kind, error
    error = c.options(node=home).submit(abs, far.submit(fail, kind)).exception(60)
    assert type(error) is hoplite_mp.TaskError and type(error.__cause__) is kind, error
def group():
    return ExceptionGroup("outer", [Two(7, "two"), ExceptionGroup("inner", [Frozen("f")])])
for found in far.submit(fail, group).exception(60), far.submit(group).result(60):
    two, inner = found.exceptions
    assert (type(two), two.args, two.code) == (Two, ("two (7)",), 7)
    assert type(inner.exceptions[0]) is Frozen
print(c.stats()["total"]["workers_lost"] if "total" in c.stats() else c.stats()["workers_lost"])
""",
    )
    assert out.splitlines() == ["0"]
