"""Legal values of message fields: limits of the protocol, and checks.

Every message checks itself when it is created, so these checks run on both sides of a connection.
Each check raises ValueError with the field's name and value. Both sides must agree on the limits in
this file; limits of one process are in `config`.
"""

from __future__ import annotations

import math
from operator import lt
from typing import Any

import msgspec

from hoplite_mp._common.ids import ID_BYTES

# Limits of the protocol. A request with SOURCES_MAX sources (18 bytes each) fits into one frame.
SOURCES_MAX = 1 << 18  # refs in one collective
SLICES_MAX = 1 << 16  # results of one reduce_scatter
NAME_CHARS_MAX = 1024  # the name of a group or an actor
OP_CHARS_MAX = 256  # the name of a reduction's operator
TEXT_CHARS_MAX = 64 << 10  # a reason or an error; the sender shortens longer texts (`shorten`)
RANKS_MAX = 64  # ranks of a group: the bits of a rank mask
NUMBER_MAX = (1 << 63) - 1  # largest unchecked number from a user
NODES_MAX = 1 << 16  # nodes of one cluster, including dead nodes, whose numbers are not reused
ADDRESSES_MAX = 64  # addresses of one node
ADDRESS_CHARS_MAX = 256  # "ip:port", IPv6 in [ ]
HOST_CHARS_MAX = 256  # a host's name, only for display
LAYOUT_BYTES_MAX = 4096  # dtype, shape and order of a source, opaque to the manager
# Names and values of options(env=), which are part of a process's start message, one packet.
ENV_BYTES_MAX = 32 << 10
# Maximum size of a value inside a message. Higher: fewer fetches; lower: other messages wait less.
INLINE_BYTES_MAX = 64 << 10
PAYLOAD_BYTES_MAX = INLINE_BYTES_MAX + (16 << 10)  # with the payload's own head
TREE_DEGREE_MAX = 1 << 10  # children of one node in a tree
RESOURCES_MAX = 64  # different resources of one node, or in one demand
RESOURCE_CHARS_MAX = 64  # the name of a resource
SHARES = 1 << 20  # every object is divided into this many shares

# The kinds of operations. The first three fold their sources, the others copy them:
# "reduce" to one node, "allreduce" to several, "reduce_scatter" slice i to node `to[i]`;
# "broadcast" one source to all of `to`, "gather" all sources to `to[0]`, "allgather" all to all,
# "alltoall" source k to `to[k % len(to)]`.
FOLDING = ("reduce", "allreduce", "reduce_scatter")
COPYING = ("broadcast", "gather", "allgather", "alltoall")
KINDS = FOLDING + COPYING
# The order in which a plan's members are folded. "fold": strictly from left to right, member by
# member; "any": they may be regrouped, so a node first folds its own members.
RULES = ("any", "fold")
# Failures of a fetch. "lost": no living node holds the object; "deleted": its owner has deleted it;
# "full": the last holder has spilled it, and lacks the memory to read it.
FETCH_ERRORS = ("lost", "deleted", "full")
# The error that the user's `get` raises. "reduce": ReduceError with the source's failure as cause;
# "source": the failure of source `cause_index`; "value": ValueError (shapes, dtypes); "lost":
# ObjectLostError; "full": StoreFullError.
OPERATION_ERRORS = ("reduce", "source", "value", "lost", "full")
# Failures of a join. "value": the request is invalid; "full": no board is free; "ended": the caller
# was a member of a group that has ended.
GROUP_ERRORS = ("value", "full", "ended")

U64_MAX = (1 << 64) - 1
NO_OBJECT = bytes(ID_BYTES)  # instead of an object's id


def shorten(text: str, chars_max: int = TEXT_CHARS_MAX, mark: str = "\n[...]\n") -> str:
    """`text` for a message: the middle of a long text is replaced by `mark`, and lone surrogates
    are replaced by `?`."""
    if len(text) > chars_max:
        half = (chars_max - len(mark)) // 2
        text = f"{text[:half]}{mark}{text[-half:]}"
    return text.encode("utf-8", "replace").decode("utf-8")


# ---- checks: each raises ValueError with the field's name and value


def counts(**fields: Any) -> None:
    for name, value in fields.items():
        if type(value) is not int or not 0 <= value <= U64_MAX:
            raise ValueError(f"{name} must be an integer from 0 to 2**64 - 1, not {value!r}")


def between(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def text(name: str, value: Any, chars_max: int, chars_min: int = 0) -> None:
    if not isinstance(value, str) or not chars_min <= len(value) <= chars_max:
        what = f"{len(value)} characters" if isinstance(value, str) else repr(value)
        raise ValueError(
            f"{name} must be a string of {chars_min} to {chars_max} characters: {what}"
        )
    value.encode()  # UnicodeEncodeError, a ValueError, for lone surrogates


def _all_between(values: tuple[Any, ...], high: int) -> bool:
    """Checks a long tuple at the speed of C. If the result is False, the caller checks the items
    one by one to name the illegal item."""
    if not values:
        return True
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= high


def numbers(name: str, value: Any, high: int = U64_MAX) -> None:
    """Checks a tuple of integers from 0 to `high`; duplicates are allowed."""
    if not isinstance(value, tuple):
        raise ValueError(f"{name} must be a tuple, not {value!r}")
    if not _all_between(value, high):
        for number in value:
            between(f"number in {name}", number, 0, high)


def seconds(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds >= 0, not {value!r}")


def rate(name: str, value: Any) -> None:
    """Checks a rate in bytes per second; None: not measured."""
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be None or bytes per second > 0, not {value!r}")


def shape(name: str, value: Any, plain: tuple[str, ...]) -> None:
    """Checks the shape of trees: one of `plain`, or `tree:d` with d >= 1; `tree:1` is a chain."""
    if value in plain:
        return
    word, _, degree = value.partition(":") if isinstance(value, str) else ("", "", "")
    if word != "tree" or not degree.isdecimal() or not 1 <= int(degree) <= TREE_DEGREE_MAX:
        allowed = ", ".join((*plain, f"tree:1 to tree:{TREE_DEGREE_MAX}"))
        raise ValueError(f"{name} must be one of {allowed}, not {value!r}")


def flags(**fields: Any) -> None:
    for name, value in fields.items():
        if type(value) is not bool:
            raise ValueError(f"{name} must be True or False, not {value!r}")


def indices(name: str, value: Any, count: int) -> None:
    """Checks a tuple of distinct indices below `count`."""
    if not isinstance(value, tuple):
        raise ValueError(f"{name} must be a tuple, not {value!r}")
    if not _all_between(value, count - 1):
        for index in value:
            between(f"index in {name}", index, 0, count - 1)
    if len(set(value)) != len(value):
        raise ValueError(f"{name} names an index twice: {value!r}")


def environment(name: str, value: Any) -> None:
    """Checks pairs of an environment variable and its value; None removes the variable."""
    nbytes = 0
    for pair in value:
        variable, content = pair
        if not isinstance(variable, str) or not (content is None or isinstance(content, str)):
            raise ValueError(f"{name} must be pairs of strings, not {pair!r}")
        if not variable or "=" in variable or "\0" in variable + (content or ""):
            raise ValueError(f"{name}: invalid variable {variable!r}")
        nbytes += len(variable) + len(content or "")
    between(f"characters of {name}", nbytes, 0, ENV_BYTES_MAX)


def object_ids(name: str, value: Any, count_min: int = 1) -> None:
    """Checks a tuple of `count_min` to SOURCES_MAX object ids."""
    if not isinstance(value, tuple):
        raise ValueError(f"{name} must be a tuple, not {value!r}")
    between(f"number of {name}", len(value), count_min, SOURCES_MAX)
    if set(map(type, value)) <= {bytes} and set(map(len, value)) <= {ID_BYTES}:
        return
    for index, item in enumerate(value):
        if not isinstance(item, bytes) or len(item) != ID_BYTES:
            raise ValueError(f"{name}[{index}] must be {ID_BYTES} bytes, not {item!r}")


def amounts(name: str, value: Any) -> None:
    """Checks sorted distinct names of resources, each with a positive number of units of
    1/10000."""
    if not isinstance(value, tuple) or len(value) > RESOURCES_MAX:
        raise ValueError(f"{name} must be a tuple of at most {RESOURCES_MAX} pairs, not {value!r}")
    for resource, units in value:
        text(f"name in {name}", resource, RESOURCE_CHARS_MAX, 1)
        between(f"units of {resource} in {name}", units, 1, U64_MAX)
    if sorted({resource for resource, _ in value}) != [resource for resource, _ in value]:
        raise ValueError(f"{name} must name each resource once, in order, not {value!r}")


def object_id(name: str, value: Any) -> None:
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise ValueError(f"{name} must be {ID_BYTES} bytes, not {value!r}")


def layout(name: str, value: Any) -> None:
    if not isinstance(value, bytes) or len(value) > LAYOUT_BYTES_MAX:
        what = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
        raise ValueError(f"{name} must be bytes, at most {LAYOUT_BYTES_MAX}: {what}")


def sorted_indices(name: str, value: Any) -> None:
    indices(name, value, SOURCES_MAX)
    if not value or list(value) != sorted(value):
        raise ValueError(f"{name} must be sorted and not empty, not {value!r}")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, compared by value, encoded as an array that begins with the
    tag. Each subclass has an explicit tag, so renaming a class changes no byte."""


COPY_ALIGN = 64


class Stripe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The shares from `begin_share` to before `end_share` of an object, which has SHARES shares.
    `owner` is the root of the stripe's tree. The planner does not know the contents of objects, so
    nodes convert shares to elements (reductions: `items * share >> 20`) or bytes (copies: rounded
    down to 64). A message may contain a stripe for each node. The message checks all its stripes
    together (`whole_object`), because this is faster."""

    owner: int
    begin_share: int
    end_share: int


def whole_object(name: str, stripes: Any) -> None:
    """Checks a tuple of adjacent, non-empty stripes that cover all shares."""
    if not isinstance(stripes, tuple):
        raise ValueError(f"{name} must be a tuple, not {stripes!r}")
    owners = [stripe.owner for stripe in stripes]
    begins = [stripe.begin_share for stripe in stripes]
    ends = [stripe.end_share for stripe in stripes]
    numbers(f"owners of {name}", tuple(owners))
    numbers(f"ends of {name}", tuple(ends), SHARES)
    if not all(map(lt, begins, ends)):
        raise ValueError(f"{name} must not be empty: {stripes!r}")
    if begins != [0, *ends[:-1]] or not ends:
        raise ValueError(f"{name} must be adjacent: {stripes!r}")
    if ends[-1] != SHARES:
        raise ValueError(f"{name} must cover all {SHARES} shares: {stripes!r}")


def copy_offset(nbytes: int, share: int) -> int:
    """The offset of a share of a copied object, in bytes."""
    return nbytes if share == SHARES else (nbytes * share >> 20) // COPY_ALIGN * COPY_ALIGN
