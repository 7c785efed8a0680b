"""CSER: distributed SGD that sends a few blocks of its updates, and resets its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.ml._draws import draw_blocks
from hoplite_mp.ml._member_operations import MemberOperations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp import Group

__all__ = ["CSER"]

Array = np.ndarray[Any, np.dtype[Any]]
UPDATE, RESET = 0, 1  # the two draws of blocks in a step


class CSER:
    """SGD with momentum: ranks exchange a few blocks of their updates, and reset their errors.

    The parameters of a rank are x = y + e. y is the same on all ranks, bit for bit; e is the part
    of the rank's own updates that it has not sent. A step sends one in `update_ratio` blocks of
    the update, and adds their mean to y; the rest of the update is added to e. Every `reset_every`
    steps, one in `reset_ratio` blocks of e is sent; its mean is added to y, and it becomes 0.
    Blocks are drawn from a shared seed, so no indices are sent. Xie et al., NeurIPS 2020,
    algorithms 2 and 4 (with GRBS).

    The constructor, `step` and `synchronize` are collective calls. All ranks begin with the
    parameters of the lowest rank.

    Parameters
    ----------
    params : list of numpy.ndarray
        float32 or float64, C-contiguous and writable; changed in place. y and e are float32.
    group : Group
        A Group that is used for nothing else.
    lr, momentum : float
        ``v = momentum * v + grad``, and the update is ``lr * v``. Default of `momentum`: 0.9.
    update_ratio, reset_ratio : float, optional
        One in this many blocks is sent; at least 1. Default: 64 and 8.
    reset_every : int, optional
        The number of steps between two resets. Default: 8.
    block : int, optional
        The number of elements in a block. Default: 4096.
    seed : int, optional
        The seed, which must be the same on all ranks. Default: 0.

    Raises
    ------
    ValueError
        A parameter is out of its range, or an array in `params` is not as described above.

    Notes
    -----
    On average, a step sends 1/update_ratio + 1/(reset_ratio·reset_every) of the bytes of a dense
    allreduce. If a rank dies, its e is lost. A replacement creates a CSER on a Group with the same
    name and rank. It receives y before the constructor returns, and begins with e = 0 and momentum
    0. The method needs shards that are alike: if shards are sorted by label, the e of the ranks
    diverge.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> def train(rank):
    ...     g = hoplite_mp.current().group("cser", 2, rank)
    ...     w = np.zeros(4, np.float32)
    ...     sgd = ml.CSER([w], g, lr=0.1, update_ratio=2, reset_ratio=1, block=1)
    ...     for step in range(80):
    ...         sgd.step([w - rank])  # the minimum is at 0 and at 1
    ...     sgd.synchronize()
    ...     return w.round(1)
    >>> c.spmd(train, 2)[1].result()
    array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """

    __module__ = "hoplite_mp.ml"

    def __init__(
        self,
        params: Sequence[Array],
        group: Group,
        lr: float,
        momentum: float = 0.9,
        update_ratio: float = 64,
        reset_ratio: float = 8,
        reset_every: int = 8,
        block: int = 4096,
        seed: int = 0,
    ) -> None:
        for name, value, low in [
            ("update_ratio", update_ratio, 1),
            ("reset_ratio", reset_ratio, 1),
            ("reset_every", reset_every, 1),
            ("block", block, 1),
            ("lr", lr, 0),
            ("momentum", momentum, 0),
        ]:
            if not value >= low:
                raise ValueError(f"{name}={value!r}: it must be at least {low}")
        self._params = [_checked(one) for one in params]
        if not self._params:
            raise ValueError("params is empty")
        self.lr, self.momentum = lr, momentum
        self._ratios = (update_ratio, reset_ratio)
        self._reset_every, self._block, self._seed = reset_every, block, seed
        self._group = group
        self._sent = self._received = 0
        self._t = 0
        self._y = _joined(self._params)
        self._e = np.zeros_like(self._y)
        self._v = np.zeros_like(self._y)
        self._operations = MemberOperations(group, self._get_state, self._set_state, lambda: None)
        self._operations.join(take_always=True)
        self._show()

    @property
    def y(self) -> Array:
        """A copy of the common parameters, as one float32 array for all of `params`."""
        return self._y.copy()

    @property
    def sent(self) -> int:
        """The number of bytes that this rank has sent, computed for allreduces by slices."""
        return self._sent

    @property
    def received(self) -> int:
        """The number of bytes that this rank has received, computed for allreduces by slices."""
        return self._received

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks that took part in the last call, sorted; the same on all ranks."""
        return self._operations.members

    def step(self, grads: Sequence[Array]) -> None:
        """Makes one step on `params`, in place.

        Parameters
        ----------
        grads : list of numpy.ndarray
            This rank's gradients at its own parameters, with the shapes of `params`.

        Raises
        ------
        ValueError
            The shapes are not those of `params`. On every rank: the ranks' parameters, ratios or
            blocks differ. In both cases the step has changed nothing.
        """
        shapes = [np.shape(one) for one in grads]
        if shapes != [one.shape for one in self._params]:
            raise ValueError(f"grads have the shapes {shapes}, not those of params")
        v = np.float32(self.momentum) * self._v + _joined(grads)
        self._operations.run(lambda: self._exchange(v))
        self._show()

    def synchronize(self) -> None:
        """Makes the parameters the same on all ranks: adds the mean of all e to y, and resets e.

        This is a dense allreduce. Call it at the end of training, or before an evaluation.
        """
        self._operations.run(self._reset_all)
        self._show()

    # -- attempts, which change the state only if they succeed -------------------------------------

    def _exchange(self, v: Array) -> None:
        update = np.float32(self.lr) * v
        sent = self._drawn(UPDATE)
        e = self._e - update
        for where in sent:
            e[where] = self._e[where]
        reset = self._drawn(RESET) if (self._t + 1) % self._reset_every == 0 else []
        parts = [update[where] for where in sent] + [e[where] for where in reset]
        mean = self._mean(np.concatenate(parts))
        at = 0
        for number, where in enumerate([*sent, *reset]):
            part = mean[at : at + where.stop - where.start]
            at += part.size
            if number < len(sent):
                self._y[where] -= part
            else:
                self._y[where] += part
                e[where] = 0
        self._e, self._v, self._t = e, v, self._t + 1

    def _reset_all(self) -> None:
        self._y += self._mean(self._e)
        self._e = np.zeros_like(self._e)

    def _mean(self, values: Array) -> Array:
        found = self._operations.call(self._group.allreduce, values, "mean", may_shrink=True)
        members = len(self._operations.members)
        moved = 2 * values.nbytes * (members - 1) // members
        self._sent += moved
        self._received += moved
        return found

    def _drawn(self, kind: int) -> list[slice]:
        size, block = self._y.size, self._block
        drawn = draw_blocks(self._seed, self._t, kind, -(-size // block), self._ratios[kind])
        return [slice(at * block, min(size, (at + 1) * block)) for at in drawn.tolist()]

    # -- state -------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Writes x = y + e into the parameters."""
        x, at = self._y + self._e, 0
        for param in self._params:
            param[...] = x[at : at + param.size].reshape(param.shape)
            at += param.size

    def _get_state(self) -> tuple[int, Array]:
        return self._t, self._y

    def _set_state(self, state: tuple[int, Array]) -> None:
        t, y = state
        if y.size != self._y.size:
            raise RuntimeError(
                f"the other ranks have {y.size} parameters, but this rank has {self._y.size}"
            )
        self._t, self._y = t, y
        self._e, self._v = np.zeros_like(y), np.zeros_like(y)


def _checked(param: Array) -> Array:
    if not isinstance(param, np.ndarray) or param.dtype not in (np.float32, np.float64):
        raise ValueError("params must be numpy arrays of float32 or float64")
    if not param.flags.c_contiguous or not param.flags.writeable:
        raise ValueError("params must be C-contiguous and writable")
    return param


def _joined(arrays: Sequence[Array]) -> Array:
    """All elements as one new float32 array."""
    return np.concatenate([np.asarray(one, np.float32).reshape(-1) for one in arrays])
