"""What a notebook shows of a Cluster, where this process is, and nestings of refs."""

from __future__ import annotations

import html.parser
import os
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hoplite_mp
from hoplite_mp import Cluster, Node, NodeLostError
from hoplite_mp._client import describing
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Reader(html.parser.HTMLParser):
    """Words, tags and their attributes; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_nodes_workers_and_memory(cluster: Cluster) -> None:
    held = cluster.put(bytes(64 << 20))
    shown = Reader(cluster._repr_html_())
    (node,) = cluster.nodes
    for word in ("h0 (here)", node.host, node.address, "2", "1 node, 2 workers"):
        assert any(word in one for one in shown.words), word
    assert any("of 256 MiB" in one for one in shown.words)
    styles = [value or "" for name, value in shown.attributes if name == "style"]
    assert any("width:25%" in style or "width:26%" in style for style in styles)
    assert shown.tags <= {"div", "strong", "table", "thead", "tbody", "tr", "td", "th"}
    del held


def test_what_comes_from_outside_is_escaped() -> None:
    evil = '<script>alert("x")</script>'
    node = Node("h1", evil, evil, 1, 95, 100)
    shown = Reader(describing.cluster_html(evil, evil, [node], "h0"))
    assert "script" not in shown.tags
    assert shown.words.count(evil) == 2
    assert any("width:95%" in (value or "") for _, value in shown.attributes)
    assert Reader(describing.cluster_html(evil, None, None, "")).words[-1] == evil


@pytest.fixture
def stopped() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(1) as made:
        assert made.submit(abs, -1).result() == 1
        made.stats()  # the node has begun, and so has its name; the first tasks need no node
        host: Any = made._host
        node = next(
            one
            for one in psutil.Process(host.process.pid).children()
            if one.name() == "hoplite node"
        )
        os.kill(node.pid, signal.SIGSTOP)
        try:
            yield made
        finally:
            os.kill(node.pid, signal.SIGCONT)


def test_a_node_that_stands_still_is_not_waited_for(
    stopped: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "ANSWER_WAIT_S", 0.2)
    shown = Reader(stopped._repr_html_())  # would wait for as long as the node is stopped
    assert any("1 worker on this host" in word for word in shown.words)


def test_a_closed_one() -> None:
    cluster = hoplite_mp.Cluster(1)
    view = cluster.options(name="x")
    assert "1 worker" in view._repr_html_()
    cluster.shutdown()
    for one in (cluster, view):
        assert Reader(one._repr_html_()).words == ["hoplite_mp.Cluster", "closed"]


def here() -> Node:
    return hoplite_mp.current().here


def test_the_node_of_this_process(cluster: Cluster) -> None:
    assert cluster.here.id == cluster.nodes[0].id
    assert cluster.options(name="x").here.workers == 2
    assert cluster.submit(here).result().id == "h0"


def test_nestings_of_refs(cluster: Cluster, tmp_path: Path) -> None:
    one, two = cluster.put(1), cluster.submit(abs, -2)
    assert cluster.get([one, [two, (one, {"x": two})]]) == [1, [2, (1, {"x": 2})]]
    assert cluster.get({"a": one, 3: [], "b": {"c": (two.ref,)}}) == {
        "a": 1,
        3: [],
        "b": {"c": (2,)},
    }
    assert cluster.get((one, two)) == (1, 2)
    assert cluster.get(()) == ()
    assert cluster.get({}) == {}
    assert cluster.get(iter([one, two])) == [1, 2]
    assert list(cluster.get({"z": one, "a": two})) == ["z", "a"]
    with pytest.raises(TypeError, match="expected a ref or a Future, not int 3"):
        cluster.get([one, {"x": 3}])
    with pytest.raises(TypeError, match="expected a ref or a Future"):
        cluster.get([one, {two}])
    failing = [cluster.submit(int, text) for text in ("x", "y")]
    with pytest.raises(ValueError, match="'y'"):
        cluster.get({"a": [one, (failing[1],)], "b": failing[0]})
    with pytest.raises(hoplite_mp.HopliteTimeoutError):
        cluster.get({"a": [cluster.submit(wait_for, tmp_path / "go")]}, timeout=0.01)
    (tmp_path / "go").touch()


def test_here_after_the_end() -> None:
    cluster = hoplite_mp.Cluster(1)
    cluster.shutdown()
    with pytest.raises((hoplite_mp.ClosedError, NodeLostError)):
        _ = cluster.here
