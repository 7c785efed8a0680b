"""`hoplite-mp promote`: makes the standby the manager at the request of an operator.

In a cluster of two hosts, neither host can detect whether the other is lost or only cut off, so an
operator must decide.
"""

from __future__ import annotations

import select
import sys
from typing import TYPE_CHECKING

from hoplite_mp._common import clock, ids
from hoplite_mp._protocol.codec import encode, promotion_decoder
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._protocol.terms import Promote, PromoteResponse
from hoplite_mp._transport.addresses import parse_address, resolve
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.tokens import load_token
from hoplite_mp.config import Config
from hoplite_mp.errors import HopliteError, ManagerLostError

if TYPE_CHECKING:
    import argparse

    from hoplite_mp._transport.stream import TcpStream

__all__ = ["promote"]

ANSWER_S = 10.0  # timeout for the answer, for which the standby must collect votes
# How long to repeat the request while the answer may change, because the lease of the lost manager
# has not expired. Higher: slower hosts have more time. Lower: a refusal is reported sooner.
RETRY_S = 5.0
RETRY_PAUSE_S = 0.3


def promote(arguments: argparse.Namespace) -> int:
    """Asks the standby to become the manager. Returns the exit code: 0 if it has."""
    deadline = clock.monotonic() + RETRY_S
    try:
        answer = _request(arguments)
        while answer.may_change and clock.monotonic() < deadline:
            clock.sleep(RETRY_PAUSE_S)
            answer = _request(arguments)
    except (HopliteError, OSError) as error:
        print(f"hoplite-mp: {error}", file=sys.stderr)
        return 1
    address = arguments.address
    if answer.leads:
        print(f"{address}: {answer.reason}")
        return 0
    print(f"hoplite-mp: {address} is not the manager: {answer.reason}", file=sys.stderr)
    return 1


def _request(arguments: argparse.Namespace) -> PromoteResponse:
    config = Config.from_environment()
    caller = Dialer(
        resolve(parse_address(arguments.address)),
        key=load_token(arguments.token_file, make=False).key,
        role="tool",
        mine=Introduction(ids.random_host_id(), software_versions()),
        tls=not arguments.no_tls,
        now=clock.monotonic(),
        timeout_s=config.connect_timeout_s,
        handshake_timeout_s=config.handshake_timeout_s,
    )
    stream = caller.wait().stream
    try:
        stream.write(encode(Promote(arguments.anyway)))
        return _answer(stream)
    finally:
        stream.close()


def _answer(stream: TcpStream) -> PromoteResponse:
    decoder = promotion_decoder()
    deadline = clock.monotonic() + ANSWER_S
    poll = select.poll()
    while (left := deadline - clock.monotonic()) > 0:
        if not stream.flush():
            break
        data = stream.read()
        if data is None:
            break
        for message in decoder.feed(data):
            if isinstance(message, PromoteResponse):
                return message
        poll.register(stream.fileno(), select.POLLIN | (select.POLLOUT * stream.wants_write))
        poll.poll(left * 1000)
    raise ManagerLostError(
        "no answer: is this the standby's address, as in `hoplite-mp up --standby`?"
    )
