"""FedLinUCB: agents of a linear bandit share their observations with few messages.

An agent sends its observations to the server only when they would change the volume of the
confidence region by a constant factor. The server is an actor. Agents do not wait for each other.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import current

if TYPE_CHECKING:
    from hoplite_mp import Actor, Node

__all__ = ["FedLinUCB", "LinUCBServer"]

Array = np.ndarray[Any, np.dtype[Any]]
RESTARTS = 8  # maximum number of restarts of the server
RETRIES = 8  # maximum number of retries of a call to the server
EXCHANGE_S = 60.0  # timeout of an exchange with the server, including restarts of the server


class LinUCBServer:
    """The server, which keeps the sums of all agents' observations. `FedLinUCB.serve` runs it as an
    actor."""

    __module__ = "hoplite_mp.ml"

    def __init__(self, n_features: int) -> None:
        self.gram = np.zeros((n_features, n_features))
        self.moment = np.zeros(n_features)
        self.rounds = 0

    def exchange(self, gram: Array, moment: Array, rounds: int) -> tuple[Array, Array]:
        """Adds an agent's sums of x xᵀ and of reward times x. Returns the sums over all agents."""
        if gram.shape != self.gram.shape or moment.shape != self.moment.shape:
            raise ValueError(
                f"the server has {len(self.moment)} features, but the agent has {len(moment)}"
            )
        self.gram += gram
        self.moment += moment
        self.rounds += rounds
        return self.gram, self.moment

    def totals(self) -> tuple[Array, Array, int]:
        """The sums, and the number of observations in them."""
        return self.gram, self.moment, self.rounds


class FedLinUCB:
    """An agent of an asynchronous federated linear bandit.

    The expected reward of an arm is linear in its features. The agent chooses the arm with the
    highest upper confidence bound, computed from the sums that it downloaded last. It communicates
    only if its own observations since then raise the determinant of the Gram matrix by a factor of
    more than 1 + alpha. Numbers are float64.

    ``messages`` is the number of messages to and from the server, two for each exchange. ``sent``
    and ``received`` are the numbers of bytes in the arrays of these messages.

    Parameters
    ----------
    n_features : int
        The number of features of an arm.
    alpha : float
        How much the determinant must grow before the agent communicates. 0: it communicates after
        every observation.
    beta : float
        The width of exploration: the bound is the estimate plus beta times the arm's deviation.
    ridge : float
        The regularisation of the estimate, above 0.
    server : Actor, LinUCBServer or None
        The server that all agents share: usually the handle that `serve` has returned, which can be
        an argument of tasks. None: a server of the agent's own, so it learns only from its own
        observations.

    Raises
    ------
    ValueError
        An argument is out of range, or an array has the wrong shape.
    ActorLostError
        The server could not be restarted. The agent keeps the observations that the server has not
        confirmed.
    HopliteTimeoutError
        The server has not replied within 60 s. The next exchange waits for the same reply.

    Notes
    -----
    The server has ``checkpoint=1`` and its calls are retried: after the death of its process or
    host no observation is lost, and none is applied twice.

    Source: He, Wang, Min, Gu: A Simple and Provably Efficient Algorithm for Asynchronous Federated
    Contextual Linear Bandits (NeurIPS 2022), algorithm 1.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> agent = ml.FedLinUCB(2, server=ml.LinUCBServer(2))
    >>> arms = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> for _ in range(100):
    ...     _ = agent.update(reward=float(agent.choose(arms) == 1))
    >>> agent.choose(arms), agent.messages < 40
    (1, True)
    """

    __module__ = "hoplite_mp.ml"

    def __init__(
        self,
        n_features: int,
        alpha: float = 1.0,
        beta: float = 1.0,
        ridge: float = 1.0,
        server: Actor | LinUCBServer | None = None,
    ) -> None:
        if n_features < 1:
            raise ValueError(f"n_features must be at least 1, not {n_features}")
        if not alpha >= 0 or not beta >= 0 or not ridge > 0:
            raise ValueError(
                "alpha and beta must be at least 0 and ridge above 0, not "
                f"{alpha}, {beta} and {ridge}"
            )
        self.n_features, self.alpha, self.beta, self.ridge = n_features, alpha, beta, ridge
        self.server = LinUCBServer(n_features) if server is None else server
        self.messages = self.sent = self.received = 0
        self._gram, self._moment = np.zeros((n_features, n_features)), np.zeros(n_features)
        self._rounds = 0  # number of observations in these two sums, which were not sent yet
        self._pending: tuple[tuple[Array, Array, int], Future[Any]] | None = None
        self._chosen: Array | None = None
        self._download(np.zeros_like(self._gram), np.zeros(n_features))

    @staticmethod
    def serve(
        n_features: int,
        *,
        name: str | None = None,
        node: Node | None = None,
        restarts: int = RESTARTS,
    ) -> Actor:
        """Starts the server as an actor on the current Cluster. Its state survives the loss of its
        process or host.

        name: the name for `Cluster.get_actor`. node: the actor's host; the actor then cannot move
        to another host. restarts: the number of deaths that the actor survives. Raises ClosedError
        if no Cluster is open."""
        options: dict[str, Any] = {"name": name, "restarts": restarts, "checkpoint": 1}
        if node is not None:
            options["node"] = node
        return current().options(retries=RETRIES, **options).actor(LinUCBServer, n_features)

    def bounds(self, arms: Any) -> Array:
        """The upper confidence bound of each arm. arms: an array of shape (arms, n_features)."""
        arms = np.asarray(arms, np.float64)
        if arms.ndim != 2 or arms.shape[1] != self.n_features or not len(arms):
            raise ValueError(f"arms have shape (arms, {self.n_features}), not {arms.shape}")
        spread = np.einsum("ij,jk,ik->i", arms, self._inverse, arms)
        return np.asarray(arms @ self._estimate + self.beta * np.sqrt(np.maximum(spread, 0.0)))

    def choose(self, arms: Any) -> int:
        """The index of the arm with the highest bound; among equal bounds, the first."""
        best = int(self.bounds(arms).argmax())
        self._chosen = np.array(np.asarray(arms, np.float64)[best])
        return best

    def update(self, reward: float, arm: Any = None) -> bool:
        """Observes the reward of `arm` (default: the arm chosen last), and communicates if needed.

        Returns whether the agent has communicated."""
        x = self._chosen if arm is None else np.asarray(arm, np.float64)
        if x is None:
            raise ValueError("no arm was chosen yet: pass `arm`")
        if x.shape != (self.n_features,):
            raise ValueError(f"an arm has shape ({self.n_features},), not {x.shape}")
        self._gram += np.outer(x, x)
        self._moment += float(reward) * x
        self._rounds += 1
        if np.linalg.slogdet(self._known + self._gram)[1] <= self._volume + np.log1p(self.alpha):
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Sends the agent's observations to the server, and downloads the sums of all agents.

        Call it at the end, so that the totals include the agent's last observations."""
        if self._pending is None:
            given = (self._gram, self._moment, self._rounds)
            self._gram, self._moment = np.zeros_like(self._gram), np.zeros(self.n_features)
            self._rounds = 0
            self._pending = (given, self._request(given))
        # After a timeout or Ctrl-C, the call is still running, so it is awaited again, not
        # repeated.
        given, reply = self._pending
        try:
            gram, moment = reply.result(EXCHANGE_S)
        except Exception:
            # If the call is done, it has failed, and the server has not confirmed the observations.
            if reply.done():
                self._pending = None
                self._gram += given[0]
                self._moment += given[1]
                self._rounds += given[2]
            raise
        self._pending = None
        self.messages += 2
        self.sent += given[0].nbytes + given[1].nbytes
        self.received += gram.nbytes + moment.nbytes
        self._download(gram, moment)

    def _request(self, given: tuple[Array, Array, int]) -> Future[Any]:
        if not isinstance(self.server, LinUCBServer):
            reply: Future[Any] = self.server.exchange(*given)
            return reply
        here: Future[Any] = Future()
        try:
            here.set_result(self.server.exchange(*given))
        except ValueError as error:
            here.set_exception(error)
        return here

    def _download(self, gram: Array, moment: Array) -> None:
        self._known = gram + self.ridge * np.eye(self.n_features)
        self._volume = float(np.linalg.slogdet(self._known)[1])
        self._inverse = np.linalg.inv(self._known)
        self._estimate = self._inverse @ moment
