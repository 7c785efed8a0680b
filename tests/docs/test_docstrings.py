"""Every public name says what it takes, returns and raises, with an example; the examples run.

All examples share one cluster, `c`, of two workers. What a docstring shows is what it prints.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.documents import PUBLIC
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECTION = re.compile(r"^([A-Z]\w+)\n-+\n(.*?)(?=^[A-Z]\w+\n-+\n|\Z)", re.M | re.S)


CALLS = {
    name: found
    for name, found in PUBLIC.items()
    if not inspect.isclass(found) or name in ("Cluster", "Executor")
}


def sections(found: Any) -> dict[str, str]:
    return {one[1]: one[2] for one in SECTION.finditer(inspect.getdoc(found) or "")}


def named(text: str) -> set[str]:
    """The names of a Parameters section."""
    heads = re.findall(r"^(\S[^:\n]*?)(?: :.*)?$", text, re.M)
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hoplite_mp.Cluster]:
    folder = tmp_path_factory.mktemp("workers")  # where examples write files in tasks
    with contextlib.chdir(folder), hoplite_mp.Cluster(workers=2, memory="64MiB") as c:
        yield c


@pytest.mark.parametrize("name", PUBLIC)
def test_its_examples_run(
    name: str, cluster: hoplite_mp.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"c": cluster, "np": np, "hoplite_mp": hoplite_mp, "__name__": "__main__"}
    text = inspect.getdoc(PUBLIC[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    eventually(lambda: cluster.here.workers == 2)  # who stood in for a waiting one has ended
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append, clear_globs=True)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_an_example(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name])
    assert text
    assert text.split("\n\n")[0].count("\n") == 0, "the first line stands alone"
    assert "Args:" not in text
    # Most forms for event loops are described with the call itself.
    if name == "Group.recv_async" or name.removesuffix("_async") not in PUBLIC.keys() - {name}:
        assert ">>>" in sections(PUBLIC[name]).get("Examples", "")


@pytest.mark.parametrize("name", CALLS)
def test_it_names_its_arguments(name: str) -> None:
    if name.endswith("_async"):
        return  # those of the call without it
    taken = set(inspect.signature(CALLS[name]).parameters) - {"self", "cls"}
    if name in ("connect", "Cluster.options", "ActorMethod.options"):
        taken = set()  # of `Cluster`, and one for each option
    assert taken <= named(sections(CALLS[name]).get("Parameters", "")), taken


def test_they_were_found() -> None:
    assert len(PUBLIC) > 80
    assert {"Cluster.put", "Group.recv", "ObjectRef.id", "Future.ref"} < PUBLIC.keys()
