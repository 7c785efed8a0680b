"""Reduction in falling order of norm, until what is missing is small."""

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
    """Sums the arrays of largest norm, until the others cannot matter much.

    Arrays are sent to one node in falling order of norm. It ends when the sum of the norms that
    were not sent is at most `xi` times the norm of the sum of those sent. An array that is not
    needed moves over no link. Chen, Sadler and Blum 2020, section III (the server's rule).

    Parameters
    ----------
    refs : list of ObjectRef or Future
        Arrays of one shape and dtype. All are waited for, because their norms are.
    norms : list of ObjectRef, Future or float
        The Euclidean norm of each array. Compute them where the arrays are.
    xi : float, optional
        At least 0, where 0 sends every array whose norm is not 0. Default: 0.25.
    to : Node or int, optional
        Where the arrays are summed, and the result is placed. Default: the caller's node.

    Returns
    -------
    ObjectRef
        The sum; its `contributors` are the indices of the arrays that were sent, once it is ready.

    Raises
    ------
    ValueError
        There are no refs, or not as many norms; a norm is negative or not finite; `xi` is negative;
        `to` is not one node.
    Exception
        Whatever a failed ref among `refs` or `norms` has failed with.

    Notes
    -----
    It saves least where the shards of the ranks are alike, which makes the norms alike, and nothing
    where the gradients cancel each other (shards sorted by label).

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
    left = [*np.cumsum(found[order][::-1])[::-1].tolist(), 0.0]  # of order[k:]
    # |sum| is at most the sum of the norms: fewer cannot suffice.
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
    # A ref that has failed takes the place of those not sent, so indices are those of `refs`.
    failed = cluster.put(0)
    cluster.delete(failed)
    chosen = set(order[:sent])
    sources = [ref if at in chosen else failed for at, ref in enumerate(refs)]
    return cluster.reduce(sources, num=sent, to=place)


def _is_enough(left: float, norm: float, xi: float) -> bool:
    return left <= xi * norm


def _add(partial: Array | None, new: list[Array]) -> Array:
    """The sum in float64, whose norm is that of the sum of all."""
    total = np.zeros(np.shape(new[0]), np.float64) if partial is None else partial.copy()
    for one in new:
        total += one
    return total


def _norm(total: Array) -> float:
    return float(np.linalg.norm(total.reshape(-1)))
