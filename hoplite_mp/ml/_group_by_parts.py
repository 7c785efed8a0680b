"""The rows of a table, in parts on several hosts. The rows of each part are sorted by group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import errors
from hoplite_mp.ml._host_tasks import NO_WORKERS, InlineTasks
from hoplite_mp.ml._newton import GroupedRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.ml._host_tasks import HostTasks

__all__ = ["Parts", "merge", "select", "split_rows"]


class Parts:
    """The parts of a table. Each part is on one host, and is read by tasks on that host.

    raw: (X, y, groups) for each part, as values or refs. `describe` sets `groups` and `classes`
    (sorted), `counts` (the number of rows for each group and class) and `n_features`."""

    def __init__(self, tasks: HostTasks, raw: list[Any], hosts: list[str], intercept: bool) -> None:
        self.tasks, self.raw, self.hosts, self.intercept = tasks, raw, hosts, intercept
        self.prepared: list[Any] = []
        self.groups: Any = None
        self.classes: Any = None
        self.counts: Any = None
        self.n_features = 0

    @property
    def p(self) -> int:
        """The number of coefficients of a model."""
        return self.n_features + self.intercept

    def describe(self) -> None:
        """Reads the groups and classes of all parts, and sorts their rows."""
        found = self._retry(lambda: self.tasks.results(self._each(_labels)))
        names: list[Any] = [groups for groups, _, _ in found]
        self.groups = np.unique(np.concatenate(names))
        self.classes = np.unique(np.concatenate([classes for _, classes, _ in found]))
        widths = {width for _, _, width in found}
        if len(widths) > 1:
            raise ValueError(f"parts of X have different numbers of columns: {sorted(widths)}")
        (self.n_features,) = widths
        if len(self.classes) > 2:
            raise ValueError(f"Logistic needs two classes: y has {len(self.classes)}")
        self.prepare()
        self.counts = sum(self._retry(lambda: self.tasks.results(self._each_prepared(_counts))))

    def prepare(self) -> None:
        self.prepared = [self._prepared(at) for at in range(len(self.raw))]

    def sum(self, function: Callable[..., Any], *args: Any) -> Any:
        """The sum of the arrays that the function returns for the parts."""
        return self._retry(lambda: self.tasks.sum(self._each_prepared(function, *args)))

    def _retry(self, call: Callable[[], Any]) -> Any:
        """The result of the call, which is repeated if a host is lost."""
        for _ in range(len(self.hosts) + 1):
            try:
                return call()
            except (errors.NodeLostError, errors.ObjectLostError, errors.ReduceError) as error:
                lost = error
                if not self.move():
                    raise
        raise lost

    def move(self) -> bool:
        """Assigns the parts of lost hosts to other hosts. Returns whether a host was lost."""
        living = [host for host in self.tasks.hosts() if self._is_alive(host)]
        if not living:
            raise errors.NodeLostError("all hosts with workers are lost")
        lost = [at for at, host in enumerate(self.hosts) if host not in living]
        for at in lost:
            self.hosts[at] = living[at % len(living)]
            if self.prepared:
                self.prepared[at] = self._prepared(at)
        return bool(lost)

    def _is_alive(self, host: str) -> bool:
        """Whether the host still runs tasks. (The list of hosts may still contain a host that was
        just lost.)"""
        try:
            self.tasks.results([self.tasks.submit(host, abs, 0)])
        except (errors.NodeLostError, errors.ObjectLostError):
            return False
        return True

    def _prepared(self, at: int) -> Any:
        args = self.groups, self.classes, self.intercept
        return self.tasks.submit(self.hosts[at], _prepare, self.raw[at], *args)

    def _each(self, function: Callable[..., Any]) -> list[Any]:
        pairs = zip(self.hosts, self.raw, strict=True)
        return [self.tasks.submit(host, function, part) for host, part in pairs]

    def _each_prepared(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        pairs = zip(self.hosts, self.prepared, strict=True)
        return [self.tasks.submit(host, function, part, *args) for host, part in pairs]


def _labels(part: Any) -> tuple[Any, Any, int]:
    """Checks a part. Returns its groups, its classes and its number of columns."""
    x, y, groups = (np.asarray(one) for one in part)
    if x.ndim != 2 or y.ndim != 1 or groups.ndim != 1 or not len(x) == len(y) == len(groups):
        raise ValueError(
            "X must be (rows, columns), y and groups (rows,): "
            f"they are {x.shape}, {y.shape}, {groups.shape}"
        )
    if not np.isfinite(x).all():
        raise ValueError("X has NaN or infinite values")
    return np.unique(groups), np.unique(y), x.shape[1]


def _prepare(part: Any, groups: Any, classes: Any, intercept: bool) -> GroupedRows:
    """The part's rows, sorted by group, with a column of ones if there is an intercept."""
    x, y, given = part
    codes = np.searchsorted(groups, np.asarray(given))
    order = np.argsort(codes, kind="stable")
    rows = np.ones((len(order), np.shape(x)[1] + intercept))
    rows[:, : np.shape(x)[1]] = np.asarray(x)[order]
    hits = (np.asarray(y)[order] == classes[-1]).astype(float)
    return GroupedRows(rows, hits, np.searchsorted(codes[order], np.arange(len(groups) + 1)))


def _counts(part: GroupedRows) -> Any:
    """The number of rows for each group and class (0 and 1)."""
    total = np.diff(part.bounds)
    hits = np.diff(np.concatenate([[0.0], np.cumsum(part.y)])[part.bounds]).astype(int)
    return np.stack([total - hits, hits], axis=1)


def select(part: GroupedRows, groups: Any) -> GroupedRows:
    """The rows of some groups in a part. The groups are renumbered from 0."""
    pieces = [slice(part.bounds[group], part.bounds[group + 1]) for group in groups]
    lengths = [piece.stop - piece.start for piece in pieces]
    x = np.concatenate([part.x[:0], *(part.x[piece] for piece in pieces)])
    y = np.concatenate([part.y[:0], *(part.y[piece] for piece in pieces)])
    return GroupedRows(x, y, np.concatenate([[0], np.cumsum(lengths, dtype=int)]))


def merge(parts: list[GroupedRows]) -> GroupedRows:
    """Merges several parts with the same groups into one part."""
    count = len(parts[0].bounds) - 1
    x, y, lengths = [], [], []
    for group in range(count):
        pieces = [(part, slice(part.bounds[group], part.bounds[group + 1])) for part in parts]
        x += [part.x[piece] for part, piece in pieces]
        y += [part.y[piece] for part, piece in pieces]
        lengths.append(sum(piece.stop - piece.start for _, piece in pieces))
    return GroupedRows(
        np.concatenate([parts[0].x[:0], *x]),
        np.concatenate([parts[0].y[:0], *y]),
        np.concatenate([[0], np.cumsum(lengths, dtype=int)]),
    )


def split_rows(tasks: HostTasks, x: Any, y: Any, groups: Any) -> tuple[list[Any], list[str]]:
    """Splits the caller's arrays into one part for each worker. Returns the parts and their
    hosts."""
    places = [host for host, workers in tasks.hosts().items() for _ in range(workers)]
    if not places:
        raise errors.NodeLostError(NO_WORKERS)
    places = places[: max(1, len(x))]
    parts = zip(*(np.array_split(one, len(places)) for one in (x, y, groups)), strict=True)
    if isinstance(tasks, InlineTasks):
        return list(parts), places
    return [tasks.put(part, [host]) for part, host in zip(parts, places, strict=True)], places
