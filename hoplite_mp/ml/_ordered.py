"""A reduction in descending order of norm, which stops when the remaining arrays are small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp import Future, Node, ObjectRef

__all__ = ["ordered_reduce"]

Array = np.ndarray[Any, np.dtype[Any]]


def ordered_reduce(
    refs: Sequence[ObjectRef[Any] | Future[Any]],
    norms: Sequence[Any],
    xi: float = 0.25,
    to: Node | int | None = None,
) -> ObjectRef[Any]:
    """Sums the arrays with the largest norms, until the others cannot change the sum much.

    Arrays are sent to one node in descending order of norm. The reduction stops when the norms of
    the remaining arrays add up to at most `xi` times the norm of the sum so far. Arrays that are
    not needed are not sent. Chen, Sadler and Blum 2020, section III (the server's rule).

    Parameters
    ----------
    refs : list of ObjectRef or Future
        Arrays of the same shape and dtype. The function waits for all of them, because it waits
        for their norms.
    norms : list of ObjectRef, Future or float
        The Euclidean norm of each array. Compute the norms on the hosts of the arrays.
    xi : float, optional
        At least 0; with 0, every array whose norm is not 0 is sent. Default: 0.25.
    to : Node or int, optional
        The node on which the arrays are summed, and the result is placed. Default: the caller's
        node.

    Returns
    -------
    ObjectRef
        The sum. Once it is ready, its `contributors` gives the indices of the arrays that were
        sent.

    Raises
    ------
    ValueError
        There are no refs, or the number of norms differs; a norm is negative or not finite; `xi`
        is negative; `to` is a list.
    Exception
        The exception of a failed ref among `refs` or `norms`.

    Notes
    -----
    Few transmissions are saved if the ranks' shards are alike, because then the norms are alike,
    and none if the gradients cancel each other (shards sorted by label).

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> refs = [c.put(np.full(2, x)) for x in (0.1, 8.0, 5.0, 0.2)]
    >>> total = ml.ordered_reduce(refs, [0.15, 11.4, 7.1, 0.3])
    >>> c.get(total), total.contributors
    (array([13., 13.]), (1, 2))
    """
    cluster = current()
    if not xi >= 0:
        raise ValueError(f"xi={xi!r}: it must be at least 0")
    if not len(refs) or len(refs) != len(norms):
        raise ValueError(
            f"{len(refs)} refs and {len(norms)} norms: pass one norm for each ref, and at least one"
        )
    if isinstance(to, (list, tuple)):
        raise ValueError("ordered_reduce sums at one node: `to` must not be a list")
    is_number = [isinstance(one, (int, float)) for one in norms]  # numpy's float64 is a float
    found = np.array(
        [one if plain else cluster.get(one) for one, plain in zip(norms, is_number, strict=True)],
        float,
    )
    if not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError("norms must be finite and not negative")
    place: Any = cluster.here if to is None else to
    order = np.argsort(-found, kind="stable").tolist()
    # left[k] is the sum of the norms of order[k:].
    left = [*np.cumsum(found[order][::-1])[::-1].tolist(), 0.0]
    # |sum| is at most the sum of the norms, so fewer arrays cannot suffice.
    sent = next(k for k in range(1, len(order) + 1) if _is_enough(left[k], left[0] - left[k], xi))
    partial: Any = None
    moved = 0
    while True:
        new = [refs[at] for at in order[moved:sent]]
        cluster.gather(new, to=place).result()
        partial = cluster.options(node=place).submit(_add, partial, new)
        moved = sent
        norm = cluster.options(node=place).submit(_norm, partial)
        if sent == len(order) or _is_enough(left[sent], norm.result(), xi):
            break
        sent += 1
    # A failed ref replaces each ref that was not sent, so that `contributors` gives indices in
    # `refs`.
    failed = cluster.put(0)
    cluster.delete(failed)
    chosen = set(order[:sent])
    sources = [ref if at in chosen else failed for at, ref in enumerate(refs)]
    return cluster.reduce(sources, num=sent, to=place)


def _is_enough(left: float, norm: float, xi: float) -> bool:
    return left <= xi * norm


def _add(partial: Array | None, new: list[Array]) -> Array:
    """Adds the new arrays to the sum so far, in float64."""
    total = np.zeros(np.shape(new[0]), np.float64) if partial is None else partial.copy()
    for one in new:
        total += one
    return total


def _norm(total: Array) -> float:
    return float(np.linalg.norm(total.reshape(-1)))
