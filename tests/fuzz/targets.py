"""Everything in the library that reads bytes of another process, as functions from bytes.

Hypothesis and the coverage-guided fuzzer must try the same decoders in the same way, and none may
be forgotten. `SOURCES` names every module that decodes anything, and who tries it; test_decoders.py
compares it with the sources.

    who sends it               what                                     where it is tried
    a stranger on the network  TLS                                      OpenSSL's own; test_tls.py
                               preamble, greetings, handshake           here; test_handshake.py
    a member of the cluster    frames of messages, each direction       here
                               block frames of data links               cext/test_engine_fuzz.py
                               payloads inside messages, their refs     here
                               layouts, addresses, certificates         here
                               documents of traces                      here
    a process of this host     requests, replies, starts, attaching     here
                               lines of workers                         here
                               words in shared memory                   cext/test_kill.py
    a file                     spilled payloads (as they were written)  as payloads, here
                               tokens, limits of the kernel             transport/, store/
                               the timeline of one worker               here

A target returns if the bytes are legal, and raises one of its `errors` if they are not. Whatever
else comes out is a defect; so is memory beyond what the length of the bytes explains.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import ml_dtypes  # noqa: F401 - a name may lead to it, and its memory is not that name's
import msgspec
import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._client.tracing import TraceText
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._node.objects.remote_objects import parse_layout, payload_layout
from hoplite_mp._node.output.output import LineSplitter
from hoplite_mp._protocol import codec, greetings, local
from hoplite_mp._protocol.diagnostics import EVENT, TraceDocument
from hoplite_mp._protocol.handshake import ClientHandshake, ServerHandshake
from hoplite_mp._protocol.peers import PeerMessage
from hoplite_mp._protocol.secret import Secret, decode_secret, encode_secret
from hoplite_mp._simulation.prediction.recording import NotRecorded, recorded
from hoplite_mp._transport.addresses import parse_address, parse_ports
from hoplite_mp._transport.certificates import Certificate
from hoplite_mp.errors import (
    ConfigError,
    HopliteError,
    ObjectLostError,
    ProtocolError,
    TaskError,
)
from tests.fuzz.making import legal
from tests.support.messages import ADDRESSES, ID, SAMPLES, TERMS_TO_MANAGER, TERMS_TO_NODE
from tests.support.peer_messages import LAYOUT, PEER_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SOURCES", "TARGETS", "Target"]

KEY, CLUSTER, NONCES = Secret(b"k" * 32), b"c" * 16, (b"1" * 32, b"2" * 32)
MINE = greetings.Introduction(11, {"python": "3.11.7", "numpy": "2.4.6"})
HOST_ID = 0x1122334455667788


@dataclass(frozen=True)
class Target:
    """`packed`: the samples are MessagePack, so that their fields can be changed one by one."""

    name: str
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    samples: tuple[bytes, ...]
    packed: bool = False


# ---- messages


def framed(body: bytes) -> bytes:
    """With right checksums, so that what is inside is looked at."""
    sums = struct.pack("<II", len(body), zlib.crc32(body))
    return sums + struct.pack("<I", zlib.crc32(sums)) + body


def _bodies(messages: tuple[Any, ...]) -> tuple[bytes, ...]:
    return tuple(map(msgspec.msgpack.encode, messages))


def _messages(name: str, make: Callable[[], codec.Decoder[Any]], samples: Any) -> Target:
    def run(body: bytes) -> None:
        for message in make().feed(framed(body)):
            assert make().feed(codec.encode(message)) == [message]

    return Target(name, run, (ProtocolError,), _bodies(samples), packed=True)


def _frames(data: bytes) -> None:
    codec.manager_decoder().feed(data)


# ---- the handshake


def _recorded() -> tuple[bytes, bytes]:
    """What both sides of one good handshake say."""
    up = down = b""
    client, server = _client(), _server()
    while said := client.outgoing():
        up += said
        server.feed(said)
        down += (answer := server.outgoing())
        client.feed(answer)
    return up, down


def _client() -> ClientHandshake:
    return ClientHandshake(KEY, "node", MINE, nonce=NONCES[0])


def _server() -> ServerHandshake:
    return ServerHandshake(KEY, "manager", CLUSTER, MINE, nonce=NONCES[1])


UP, DOWN = _recorded()


def _shaken(
    make: Callable[[], ClientHandshake | ServerHandshake], good: bytes
) -> Callable[[bytes], None]:
    proved = good[: good.rindex(b"Introduction") - 4]  # what comes then is said by who is known

    def run(data: bytes) -> None:
        twin = make()
        try:
            twin.feed(data)
        finally:
            assert len(twin._buffer) <= greetings.GREETING_BYTES_MAX + greetings.LENGTH.size
            assert twin.result is None or data.startswith(proved)

    return run


# ---- payloads


def _loads(stream: Any, *, buffers: Any = ()) -> None:
    """In place of pickle's: what a stream says is judged by nobody; its buffers must be there."""
    for buffer in buffers:
        memoryview(buffer)


def _decoded(data: bytes) -> None:
    with mock.patch.object(pickle, "loads", _loads), contextlib.suppress(TaskError):
        _serialize.decode(memoryview(data), make_ref=ObjectRef, writable=len(data) % 2 == 1)


def _call(data: bytes) -> None:
    """Arguments that were lost have an error in their place, which is raised: any other error is
    the decoder's."""
    lost = (TaskError,) if _serialize.payload_kind(memoryview(data)) == _serialize.ERROR else ()
    loads = mock.patch.object(pickle, "loads", return_value=([], []))
    with loads, contextlib.suppress(*lost):
        _serialize.decode_call(memoryview(data), ObjectRef, lambda ref: None)


def _described(data: bytes) -> None:
    mem = memoryview(data)
    _serialize.payload_kind(mem)
    _serialize.describe_array(mem)
    _serialize.read_contributors(mem)
    _serialize.read_refs(mem)
    _serialize.read_dependencies(mem)
    payload_layout(mem)


REF = ObjectRef(ID)
VALUES = (
    7, 2.5, 1j, True, None, np.float32(1.5), "text", b"bytes", bytearray(b"more"), [1, 2],
    np.arange(6.0).reshape(2, 3), np.zeros((0, 3), "i2"), np.array(["a", "bc"]),
    np.array(5, "M8[s]"), {"array": np.arange(300), "ref": REF},
)  # fmt: skip
PAYLOADS = (
    *(_serialize.encode(value).tobytes() for value in VALUES),
    _serialize.encode_array_head("f4", (2, 3), "F", (0, 2, 5))[0].ljust(256, b"\0"),
    _serialize.encode_error(KeyError("missing")).tobytes(),
)
CALLS = (
    *(
        _serialize.encode_call(args, kwargs).tobytes()
        for args, kwargs in (
            ((1, "x"), {}),
            ((REF, 2, REF), {}),
            (([REF, np.arange(9)],), {"k": REF}),
        )
    ),
    _serialize.encode_error(ObjectLostError("gone")).tobytes(),  # in the place of arguments
)

# ---- the rest

DOCUMENT = msgspec.msgpack.encode(
    TraceDocument(
        "host", 7, 10, 90,
        [(2, 4711, b"".join(EVENT.pack(i, 20, 30, i, 1, 1, 3, b"train", 8, 9) for i in range(2)))],
        {1: ID}, [("transfer", "object", 20, 40, {"from": 1, "object": ID, "bytes": 64})], 0,
    )
)  # fmt: skip
TIMELINE = json.dumps(
    {
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "tid": 7, "args": {"name": "x"}},
            *(
                {"ph": "X", "name": "allreduce g", "cat": "group call", "tid": 7, "ts": 2.0 * at,
                 "dur": 1.5, "args": {"outcome": "done", "rank": 0, "bytes_in": 40}}
                for at in range(8)
            ),
        ],
        "otherData": {"dropped": {}},
    }
).encode()  # fmt: skip
PEM = b"-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----\n" + (
    b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
)


def _trace(data: bytes) -> None:
    list(TraceText(0, 100).node(1, data, [(0, 1, 1), (50, 2, 1)]))


def _lines(data: bytes) -> None:
    lines = LineSplitter(HOST_ID, 100)
    found = [run for at in range(0, len(data), 37) for run in lines.feed(data[at : at + 37])]
    found += lines.finish()
    assert all(len(line) <= 100 for _, run in found for line in run)
    assert sum(len(line) for _, run in found for line in run) <= len(data)


def _address(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ConfigError):
        parse_ports(text)
    parse_address(text)


def _packets(name: str, kind: Any) -> Target:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind, dec_hook=decode_secret)
    samples = tuple(map(msgspec.msgpack.Encoder(enc_hook=encode_secret).encode, legal(kind)))
    return Target(
        f"local: {name}", decoder.decode, (msgspec.MsgspecError, ValueError), samples, packed=True
    )


LOCAL = {
    "Request": local.Request,
    "Reply": local.Reply,
    "ToSupervisor": local.ToSupervisor,
    "FromSupervisor": local.FromSupervisor,
    "Attached": local.Attached | local.AttachRefused,
    "Start": local.Start,
    "Line": tuple[int, str, bytes],
}
GREETINGS = (
    greetings.Hello("node", NONCES[0], CLUSTER), greetings.Challenge("manager", NONCES[1], CLUSTER),
    greetings.Proof(b"k" * 32), greetings.Welcome(b"k" * 32), greetings.Refused("token", "why"),
    MINE,
)  # fmt: skip

TARGETS = (
    Target("frames", _frames, (ProtocolError,), (b"".join(map(framed, _bodies(SAMPLES[:3]))),)),
    _messages("from nodes", codec.manager_decoder, (*SAMPLES, *TERMS_TO_MANAGER)),
    _messages("from the manager", codec.node_decoder, (*SAMPLES, *TERMS_TO_NODE)),
    _messages("from peers", lambda: codec.Decoder(PeerMessage), PEER_SAMPLES),
    Target("greetings", greetings.decode_body, (ProtocolError,), _bodies(GREETINGS), packed=True),
    Target("server's handshake", _shaken(_server, UP), (HopliteError,), (UP,)),
    Target("client's handshake", _shaken(_client, DOWN), (HopliteError,), (DOWN,)),
    Target("payloads", _decoded, (ValueError, ImportError), PAYLOADS),
    Target("heads of payloads", _described, (ValueError, ImportError), PAYLOADS + CALLS),
    Target("calls", _call, (ValueError,), CALLS),
    Target("layouts", parse_layout, (ValueError,), (LAYOUT, b"shape () and dtype bfloat16")),
    Target("addresses", _address, (ConfigError,), tuple(a.encode() for a in ADDRESSES)),
    Target("certificates", Certificate, (ValueError,), (PEM,)),
    Target("traces", _trace, (ProtocolError,), (DOCUMENT,), packed=True),
    Target("timelines", recorded, (NotRecorded,), (TIMELINE,)),
    Target("lines", _lines, (), (b"a line\nanother\0hoplite_mp 1122334455667788 %016x\nmore" % 5,)),
    *(_packets(name, kind) for name, kind in LOCAL.items()),
)

OWN = "what this very process, or the kernel, has written"
# Every module that decodes anything: the targets that try it, or why nothing has to.
SOURCES: dict[str, str] = {
    "_client/actors.py": "payloads",
    "_client/attached.py": "local: Attached",
    "_client/captured_arrays.py": OWN,
    "_client/channel.py": "local: Reply",
    "_client/futures.py": "payloads",
    "_client/launch.py": "local: Line",
    "_client/memory.py": "payloads",
    "_client/runtime.py": OWN,
    "_client/streams.py": "payloads",
    "_client/tracing.py": "traces",
    "_cli/doctor/trial.py": OWN + ": a program that it has started",
    "_common/ids.py": "frames; from nodes; from peers",
    "integrations/_sidecar/sidecar.py": OWN + ": the sidecar that it has started",
    "integrations/torch/_own_cluster.py": "what a rank of this program has put into torch's store",
    "integrations/ray/_actors.py": "what a process of the same cluster of Ray has stored with Ray",
    "_cli/dump.py": "a member's answer to a person who asked: shown, and nothing else",
    "_manager/standby.py": OWN,
    "_simulation/interconnects/tree_schedules.py": OWN,
    "ml/_compressors.py": "codes of other ranks of the program; ml/test_compressors.py",
    "ml/_feedback.py": "codes of other ranks of the program; ml/test_feedback.py",
    "_group/single_host.py": OWN,
    "_group/call_protocol.py": "payloads",
    "_client/in_place.py": "payloads",
    "_node/groups/engine_commit.py": OWN,
    "_group/multi_host.py": "payloads",
    "_group/collectives.py": "payloads",
    "_node/execution/local_reduce.py": "payloads",
    "_node/execution/folding.py": OWN,
    "_node/groups/group_decisions.py": "payloads",
    "_node/runtime/main.py": "local: FromSupervisor",
    "_node/peers/peers.py": "from peers",
    "_node/collectives/chunked_reduce.py": "heads of payloads",
    "_node/diagnostics/tracing.py": OWN,
    "_node/io/client_sockets.py": "local: Request",
    "_node/io/spill_file.py": OWN,
    "_node/diagnostics/waits.py": OWN,
    "_protocol/codec.py": "frames; from nodes; from the manager; from peers",
    "_protocol/greetings.py": "greetings; server's handshake; client's handshake",
    "_serialize/out_of_band.py": "payloads",
    "_serialize/arrays.py": "payloads; heads of payloads",
    "_serialize/calls.py": "calls; heads of payloads",
    "_serialize/errors.py": "payloads",
    "_serialize/layout.py": "payloads; heads of payloads",
    "_serialize/reading.py": "payloads",
    "_serialize/streams.py": "payloads; calls",
    "_serialize/tensors.py": "payloads",
    "_serialize/values.py": "payloads",
    "_simulation/prediction/recording.py": "timelines",
    "_simulation/virtual/processes.py": OWN,
    "_supervisor/boot.py": "local: Start",
    "_supervisor/exec_worker.py": "local: Start",
    "_supervisor/main.py": "local: ToSupervisor",
    "_transport/rendezvous.py": OWN,
    "_worker/checkpoints.py": "payloads",
    "_worker/main.py": "payloads; calls",
    "_worker/preimport.py": "payloads; calls",
    # Decoders that use none of the calls that the test looks for.
    "_node/objects/remote_objects.py": "layouts",
    "_node/output/output.py": "lines",
    "_sync/queues.py": "payloads",
    "_transport/addresses.py": "addresses",
    "_transport/tls.py": "certificates",
}
