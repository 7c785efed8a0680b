"""All limits of the library, and what a higher or lower value of each changes.

Nothing in hoplite_mp grows, waits or retries without a bound. Every bound that a user may want to
set is a field here; all others are constants at the top of the file that uses them. A field's name
ends in its unit, followed by `_max` if the value is an upper limit. An argument takes precedence
over the environment (`HOPLITE_MP_<FIELD>`), and the environment over the default. This module only
defines and checks values; it measures nothing, and must not depend on the code that uses them.
"""

import contextlib
import itertools
import numbers
import operator
import os
import re
import sys
import warnings
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from hoplite_mp.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SPAN_BYTES_MIN = 64 * KIB

# Types of fields. A constraint of one field is in its annotation, and messages are made from it.
_FINITE = sys.float_info.max
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=_FINITE)]
Above0 = Annotated[float, Meta(gt=0, le=_FINITE)]
Directory = Annotated[str, Meta(min_length=1, description="the path of a directory")]
Resources = Annotated[str, Meta(pattern="=", description='a list such as "gpu=2,disk=0.5"')]
Command = Annotated[
    str,
    Meta(description="a command with {host} in it, and {arguments} as a word of its own"),
]

_PREFIX = "HOPLITE_MP_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """A number of bytes from "2GiB", "512 MB", "1.5g" or "65536".

    Units with an "i" are powers of 1024, others of 1000, as in the standard that defines both.
    """
    if not isinstance(text, (str, bool)):
        with contextlib.suppress(TypeError):
            return operator.index(text)
    match = _SIZE.fullmatch(text.strip() if isinstance(text, str) else "")
    if match is None:
        raise ConfigError(
            f"size {text!r} is not understood; write bytes or a number with a unit, "
            'such as "65536", "512MiB" or "2GiB"'
        )
    number, unit, binary = match.groups()
    step = 1024 if binary else 1000
    factor: int = step ** _POWER[(unit or "").lower()]
    return round(float(number) * factor)


# Fields that had other names before 0.1. The old names work until 0.2, with a DeprecationWarning.
RENAMED = {
    "beat_interval_s": "heartbeat_interval_s",
    "silence_s": "heartbeat_timeout_s",
    "unauthenticated_max": "pending_handshakes_max",
    "carried_array_bytes_min": "captured_array_bytes_min",
}

# Fields that have become arguments of `init` of integrations.ray and integrations.dask. As fields
# they are passed to it until 0.2, with a DeprecationWarning.
MOVED = {"foreign_hold_s": "ref_hold_s", "beside_idle_s": "node_idle_s"}


def _warn_moved(old: str, name: str, value: object, *, stacklevel: int) -> float:
    """Warns about a field that has become an argument, and returns its value, checked."""
    text = f"{name} has become {MOVED[old]}= of init() of integrations.ray and integrations.dask"
    warnings.warn(
        f"{text}; the old name works until hoplite_mp 0.2",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
    return check_seconds(name, value)


def check_seconds(name: str, value: object) -> float:
    """The value as a finite number of seconds, at least 0. Any other raises a ConfigError that
    names it."""
    plain = _plain(value)
    if isinstance(plain, (int, float)) and not isinstance(value, bool) and 0 <= plain <= _FINITE:
        return float(plain)
    raise ConfigError(f"{name}={value!r} is not allowed: a finite number from 0")


def _warn_renamed(old: str, prefix: str = "", *, stacklevel: int) -> str:
    """Warns about an old name, and returns the new one. stacklevel: of the caller's caller."""
    new = RENAMED[old]
    names = (prefix + name.upper() for name in (old, new)) if prefix else (old, new)
    text = "{} is now called {}; the old name works until hoplite_mp 0.2".format(*names)
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
    return new


class _ConfigMeta(type):
    """Accepts old names of fields, and appends the docstrings of fields to the docstring of their
    class. These are taken from the source only when `__doc__` is read, as by `help`, so they cost
    nothing at import."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for old in RENAMED.keys() & values.keys():  # dataclasses.replace gives both names
            values[_warn_renamed(old, stacklevel=2)] = values.pop(old)
        given = {old: values.pop(old) for old in MOVED.keys() & values.keys()}
        made = super().__call__(*args, **values)
        for old, value in given.items():
            object.__setattr__(made, "_" + MOVED[old], _warn_moved(old, old, value, stacklevel=2))
        return made

    @property
    def __signature__(cls) -> Any:
        """The fields without their constraints, for `inspect.signature`, which otherwise shows the
        signature of `__call__`."""
        import inspect

        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        shown = []
        for one in list(own.parameters.values())[1:]:
            kind, _, optional = _constraints(one.name)
            shown.append(one.replace(annotation=kind | None if optional else kind))
        return own.replace(parameters=shown)

    @property
    def __doc__(cls) -> str | None:  # type: ignore[override]
        own = cls.__dict__.get("__doc__")
        if not hasattr(cls, "__match_args__"):  # read by `dataclass` while it makes the class
            return own or cls.__name__  # an empty text would make `dataclass` write one
        if own is None:  # python -OO
            return None
        import ast
        import inspect
        import textwrap

        own = inspect.cleandoc(own)
        try:
            tree = ast.parse(inspect.getsource(sys.modules[__name__]))
        except (KeyError, OSError, SyntaxError, TypeError):  # the source is not available
            return own
        (body,) = [
            one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == cls.__name__
        ]
        words = [own]
        for field, below in itertools.pairwise(body.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)):
                continue
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                default = "" if field.value is None else f" = {ast.unparse(field.value)}"
                text = textwrap.indent(inspect.cleandoc(below.value.value), "    ")
                words.append(f"{ast.unparse(field.target)}{default}\n{text}")
        return "\n\n".join(words)


class _MovedFields:
    """Values of fields that have become arguments, if they were given by the old names."""

    __slots__ = tuple("_" + name for name in MOVED.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(_MovedFields, metaclass=_ConfigMeta):
    """The limits of one cluster. Immutable: `dataclasses.replace` makes a changed copy.

    Raises
    ------
    ConfigError
        A value of the wrong type, or out of its range; the message says what is allowed.

    Examples
    --------
    >>> config = hoplite_mp.Config(retries=0, heartbeat_timeout_s=5)
    >>> config.retries
    0
    """

    __module__ = "hoplite_mp"  # as users import it

    # -- memory --------------------------------------------------------------------------------

    small_object_bytes_max: Annotated[int, Meta(ge=64)] = 64 * KIB
    """Payloads up to this size share a span with others; larger ones get a span of their own.
    Higher: fewer requests to the node, more bytes idle in half-used small spans.
    Lower: less waste, but every object above it costs one round trip to the node."""

    span_bytes: Annotated[int, Meta(ge=SPAN_BYTES_MIN)] = 1 * MIB
    """The size of a span of small objects, leased to one client at a time. Spans are smaller in a
    store in which one of this size for each process would take more than half of the space.
    Higher: fewer leases per second. Lower: less memory tied up by clients that put few objects."""

    captured_array_bytes_min: Count = 1 * MIB
    """Arrays of at least this size that a function by value captures (globals, closure, defaults)
    are stored as objects: they are sent again only after a change, and a warning names global ones.
    Higher: more arrays are serialized with each task that uses them.
    Lower: more objects, and a check of each at every submit, which takes some 5 microseconds."""

    stream_bytes_max: Count = 128 * MIB
    """Bytes of items that a stream may produce before its reader has taken them; then the generator
    pauses, unless options(buffersize=) limits the number of items. Each item counts at least 4 KiB.
    Higher: generator and reader wait for each other less often. Lower: each stream takes less of
    the store."""

    queue_item_bytes_max: Count = 16 * KIB
    """Items of a Queue up to this size are sent inside its messages and kept in the memory of its
    actor; larger ones are objects in the store of the host that puts them.
    Higher: fewer objects, and fewer items that are lost with a host. Lower: less data passes
    through the actor, which copies it twice while all users of the queue wait."""

    put_wait_s: Seconds = 10.0
    """How long a put waits for space in a full store before StoreFullError.
    Higher: short bursts succeed. Lower: a program that leaks refs fails sooner."""

    error_reserve_bytes: Count = 1 * MIB
    """Space for errors beyond the limit of a full store, at most a sixteenth of it, so that a task
    can report why it failed. Each error takes at least 4 KiB of it.
    Higher: more errors are kept complete. Lower: less memory beyond memory=; an error without space
    keeps its type and the beginning of its text."""

    error_bytes_max: Annotated[int, Meta(ge=4 * KIB)] = 64 * KIB
    """Longest exception, with its traceback, that is stored in the reserve; a longer one waits for
    space like any value, and is then cut to this size.
    Higher: long tracebacks stay complete. Lower: the reserve holds more errors."""

    memory_reserve_bytes: Count = 256 * MIB
    """Available memory (as the system reports it) that the store leaves free, at most an eighth of
    the smaller of RAM and the control group's limit.
    Higher: less risk from the out-of-memory killer. Lower: more objects fit on a dedicated host."""

    memory_bytes: Annotated[int, Meta(ge=MIB)] | None = None
    """Size limit of the store; None: a third of the smaller of RAM and the control group's limit.
    Higher: more objects before puts wait or spill. Lower: more memory for the tasks' own arrays."""

    spill_dir: Directory | None = None
    """Directory to which objects are spilled when the store is full; None: the first of TMPDIR,
    /var/tmp and the working directory that is on a disk. The file has no name and ends with the
    node. A faster disk: shorter waits when the store is full."""

    spill_bytes_max: Count | None = None
    """Limit of the bytes in spill_dir; None: the size of the disk.
    Higher: larger data sets. Lower: more space for other users of the disk."""

    memory_idle_s: Seconds = 30.0
    """How long freed memory stays unused before it is returned to the system; it is returned within
    twice that time. Higher: programs that work in waves reuse pages. Lower: memory is free for
    other programs sooner, and the next wave pays for new pages."""

    populate_ahead_bytes: Count = 128 * MIB
    """How far ahead of demand the node allocates pages.
    Higher: more large puts run at memory speed. Lower: less memory is allocated in advance; 0
    leaves every page fault to the process that writes."""

    # -- waiting -------------------------------------------------------------------------------

    spin_us_max: Annotated[int, Meta(ge=0, le=10_000)] = 50
    """How long a waiter spins before it blocks. It blocks at once if the processes that wait for
    each other are more than the host's cores.
    Higher: shorter latency of short tasks, at the cost of a busy core. Lower: cores stay idle, and
    every wait costs a system call and a wake-up."""

    drain_interval_s: Annotated[float, Meta(gt=0, le=60)] = 0.25
    """Interval at which the owner of a table collects freed and finished entries without a wake-up.
    Higher: less background work. Lower: memory returns sooner in a process that only waits."""

    connect_timeout_s: Seconds = 10.0
    """How long to try to reach a manager at the given address.
    Higher: a cluster that is still starting is found. Lower: a wrong address fails sooner."""

    start_timeout_s: Above0 = 30.0
    """Timeout for the start of a host's own processes.
    Higher: slow disks and loaded machines succeed. Lower: a broken installation fails sooner."""

    shutdown_timeout_s: Seconds = 5.0
    """How long processes may take to end by themselves before they are killed. Also how long,
    before that, unread results are read back from the spill file, so that they stay readable.
    Higher: these results and output are complete. Lower: shutdown is fast whatever hangs."""

    # -- tasks ---------------------------------------------------------------------------------

    # a header word has 8 bits for the attempt; half of their values are spare
    retries: Annotated[int, Meta(ge=0, le=127)] = 3
    """How often a task is run again after the death of its worker; never after an exception.
    Higher: work survives an unstable host. Lower: a task that kills its worker fails sooner."""

    lineage_bytes_max: Count = 64 * MIB
    """Several hosts: memory on each host for the lineage of results: functions and arguments by
    value (in the store), and 1 KiB for each result above 64 KiB that a process holds. Beyond the
    limit the oldest entries are dropped; a result without lineage stays lost.
    Higher: longer chains of tasks, and larger arguments, survive the death of a host. Lower: less
    of the store is used; 0: no result is reconstructed."""

    start_attempts_max: Annotated[int, Meta(ge=2)] = 5
    """Failed starts in a row of a pool's workers after which waiting tasks fail with
    WorkerLostError. The starts are still retried, and tasks succeed again when one does.
    Higher: a longer shortage of memory is only a delay. Lower: waiting tasks fail sooner, with the
    reason."""

    restart_pause_s: Above0 = 0.1
    """Pause before the third attempt in a row to start a worker (the second is made at once); it
    doubles with each further attempt, up to restart_pause_s_max.
    Higher: less work for workers that die at once. Lower: faster recovery from a short problem."""

    restart_pause_s_max: Above0 = 5.0
    """Longest pause between two attempts to start a worker. A worker that has lived for this long
    has started successfully.
    Higher: less load on a host with problems. Lower: its workers are back sooner afterwards."""

    cancel_grace_s: Seconds = 2.0
    """How long an interrupted task may clean up before its worker is killed.
    Higher: files are closed, locks released. Lower: cancelling is faster."""

    # a host has 256 client slots
    blocked_workers_max: Annotated[int, Meta(ge=0, le=200)] = 128
    """How many extra workers a pool may start in place of workers that wait inside a task.
    Higher: deeper trees of tasks and larger groups make progress. Lower: fewer processes; at the
    limit, if all workers wait, the tasks that they have submitted fail with WorkerLostError."""

    nested_depth_max: Annotated[int, Meta(ge=1, le=200)] = 32
    """How many tasks a worker may run inside one another: a task that waits for tasks that it has
    submitted runs them itself. Recursion is not limited: deeper tasks run in other workers, and
    in extra workers up to blocked_workers_max.
    Higher: deep trees of tasks need fewer processes, and deeper stacks. Lower: extra workers start
    sooner."""

    resources: Resources | None = None
    """Resources of this host for options(resources=), for example "gpu=2,disk=0.5"; None: none.
    Cluster(resources=) and the option --resources take precedence."""

    resource_wait_s: Seconds = 30.0
    """How long tasks wait for another node with the required resources after the last such node is
    gone, before NodeLostError.
    Higher: a restarted host finds its tasks waiting. Lower: such tasks fail sooner."""

    # _protocol/output.py: LINE_BYTES_MAX
    output_line_bytes_max: Annotated[int, Meta(ge=80, le=MIB)] = 64 * KIB
    """Longest line of a worker's output that is forwarded in one piece; longer ones are split.
    Higher: long lines stay in one piece. Lower: less memory per worker in the node."""

    output_wait_s: Seconds = 10.0
    """Several hosts: how long lines of workers' output wait for a driver that reads none. Then they
    are dropped, and a line reports their number. On one host lines wait without a limit.
    Higher: a suspended driver misses nothing. Lower: workers with much output are free for
    other programs sooner."""

    blas_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Threads of BLAS, OpenMP, Numba and torch in each process of a pool or actor; None: the values
    of OMP_NUM_THREADS and similar variables, otherwise cores / processes of the pool, and 1 in an
    actor. Higher: a single large product is faster. Lower: processes do not compete for cores."""

    await_read_bytes_max: Count = 256 * KIB
    """Largest value that `await` reads in the event loop; larger values are read in a thread,
    unless they are arrays that are read without a copy.
    Higher: fewer thread switches. Lower: the loop is blocked for a shorter time."""

    await_threads_max: Annotated[int, Meta(ge=1)] = 8
    """Threads of a process in which `await` reads values that are on another host or on disk, or
    that take long to read; they start when they are first needed.
    Higher: more values are read at a time. Lower: fewer threads."""

    # -- collectives and groups ----------------------------------------------------------------

    reduce_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Threads of the node for reductions; None: one for each core.
    Higher: large arrays are reduced at memory speed. Lower: tasks keep more of the cores."""

    collective_refs_max: Annotated[int, Meta(ge=1, le=32_768)] = 32_768
    """Most refs in one collective. They are sent to the node in one packet, 9 bytes each; without
    privileges a packet has at most 416 KiB.
    Lower: a wrong list is refused before it costs memory in node and manager."""

    group_wait_s: Seconds = 30.0
    """How long a Group waits for its missing members before it fails.
    Higher: members may start late. Lower: a Group that never fills fails sooner."""

    group_members_max: Annotated[int, Meta(ge=1, le=64)] = 64
    """Largest size of a Group; it cannot be raised, because the masks of a board have 64 bits.
    Lower: a wrong size is refused before it fills the host with waiting workers."""

    group_buffer_bytes_max: Count = 8 * MIB
    """Largest array of a Group's call on one host that is passed in a call buffer. A Group keeps
    two buffers for each rank and each size that it has used. Larger arrays are passed as objects,
    and so are all arrays if the store has no space for buffers.
    Higher: larger calls need no objects, but a Group takes more of the store. 0: no buffers."""

    # -- diagnostics ---------------------------------------------------------------------------

    trace_events_max: Annotated[int, Meta(ge=1)] = 500_000
    """Events of a trace that a node keeps: this many of its processes (64 bytes each), and this
    many of its own (transfers, collectives, spilling). Older ones are dropped and counted.
    Higher: longer traces of short tasks are complete. Lower: less memory in the node, and a smaller
    file."""

    # -- other hosts ---------------------------------------------------------------------------

    handshake_timeout_s: Above0 = 5.0
    """Handshake timeout of a connection. On the connecting side it starts with the first byte of
    the server, which may keep connections in a queue.
    Higher: slow and distant hosts can connect. Lower: silent connections end sooner."""

    heartbeat_interval_s: Above0 = 0.2
    """Interval of the heartbeats between nodes and the manager.
    Higher: less work in a cluster of many hosts. Lower: heartbeat_timeout_s can be shorter."""

    heartbeat_timeout_s: Above0 = 1.5
    """How long a host may be silent before it is declared dead. A host gets four times its longest
    silence of the last minute if that is more, up to eight times this value. In a cluster with a
    standby this is also the manager's lease.
    Higher: short pauses lose no host. Lower: other hosts continue sooner after a death."""

    pending_handshakes_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Most unauthenticated connections at a time, at each listener; each can take some 100 KiB of
    the process's memory. Four times as many can wait in a queue. Only a host that has more than its
    share loses connections.
    Higher: more hosts can join at the same moment. Lower: strangers cost less memory."""

    hosts_command: Command = "ssh -o BatchMode=yes {host} hoplite-mp {arguments}"
    """Command that starts a node of Cluster(hosts=). It is split into words as a shell does, and
    runs without a shell. {host} is an element of hosts=, the word {arguments} stands for the
    arguments of hoplite-mp. The command must not end before hoplite-mp does, and must pass its
    standard input on to hoplite-mp."""

    hosts_wait_s: Seconds = 60.0
    """How long Cluster(hosts=) waits until all nodes have joined before NodeLostError.
    Higher: slow hosts can join. Lower: a missing host fails sooner."""

    def __getattr__(self, name: str) -> Any:
        if name in RENAMED:
            return getattr(self, _warn_renamed(name, stacklevel=2))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __post_init__(self) -> None:
        for field in fields(self):  # numbers of numpy become those of Python
            value = getattr(self, field.name)
            if type(value) is str and "\0" in value:
                raise _refused(field.name, value)
            if value is not None and type(value) not in (int, float, bool, str):
                object.__setattr__(self, field.name, _plain(value))
        try:
            msgspec.convert(self, _Limits, from_attributes=True)
        except msgspec.ValidationError as error:
            name = str(error).rpartition(".")[2].rstrip("`")
            raise _refused(name, getattr(self, name)) from None
        command = self.hosts_command
        if not ("{host}" in command and "{arguments}" in command.split()):
            raise _refused("hosts_command", command)
        if self.span_bytes.bit_count() > 1:  # spans are aligned to their size
            raise _refused("span_bytes", self.span_bytes)
        if self.small_object_bytes_max > self.span_bytes // 2:
            raise ConfigError(
                f"small_object_bytes_max={self.small_object_bytes_max} does not fit: at least two "
                f"objects must fit a span, so at most span_bytes // 2 = {self.span_bytes // 2}"
            )
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            shortest = f"three times heartbeat_interval_s={self.heartbeat_interval_s:g}"
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s:g} is too short: use at least "
                f"{shortest}"
            )

    @classmethod
    def from_environment(cls, **overrides: Any) -> "Config":
        """The limits from `overrides`, from ``HOPLITE_MP_<FIELD>``, or else the defaults.

        In the environment "none" stands for None, and every number of bytes may have a unit:
        `HOPLITE_MP_MEMORY_BYTES=2GiB`.

        Parameters
        ----------
        **overrides
            Fields by their names; None means "not given".

        Raises
        ------
        ConfigError
            A value that is not allowed; the message names the field or the variable.
        TypeError
            A field that does not exist.

        Examples
        --------
        >>> hoplite_mp.Config.from_environment(put_wait_s=2.0).put_wait_s
        2.0
        """
        overrides = {
            _warn_renamed(name, stacklevel=2) if name in RENAMED else name: value
            for name, value in overrides.items()
        }
        values = {name: value for name, value in overrides.items() if value is not None}
        for old, new in RENAMED.items():
            variable = _PREFIX + old.upper()
            if os.environ.get(variable, "") != "" and not os.environ.get(_PREFIX + new.upper()):
                _warn_renamed(old, _PREFIX, stacklevel=2)
                if new not in values:
                    values[new] = _parse(new, variable)
        for old in MOVED:
            variable = _PREFIX + old.upper()
            if old not in values and os.environ.get(variable, "") != "":
                try:
                    values[old] = float(os.environ[variable])
                except ValueError as error:
                    check_seconds(variable, os.environ[variable])
                    raise AssertionError from error
        for field in fields(cls):
            variable = _PREFIX + field.name.upper()
            if field.name not in values and os.environ.get(variable, "") != "":
                values[field.name] = _parse(field.name, variable)
        unknown = sorted(overrides.keys() - {field.name for field in fields(cls)} - MOVED.keys())
        if unknown:
            raise TypeError(f"Config has no field {', '.join(unknown)}")
        return cls(**values)


_TYPES = {field.name: field.type for field in fields(Config)}
_Limits = msgspec.defstruct("_Limits", _TYPES.items())  # validates a Config


def _plain(value: object) -> object:
    """A number of another type, such as numpy's, as int or float; any other value unchanged."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def _constraints(name: str) -> tuple[type, Meta, bool]:
    """(type, constraints, whether None is allowed) of a field."""
    first, *others = get_args(_TYPES[name])
    if isinstance(others[0], Meta):
        return first, others[0], False
    return *get_args(first), True


def _refused(name: str, value: object, variable: str = "") -> ConfigError:
    """The error about a value of a field, or of the variable that should have set it."""
    kind, meta, optional = _constraints(name)
    what = meta.description or ("a whole number" if kind is int else "a finite number")
    if kind is not str:
        what += f" from {meta.ge}" if meta.gt is None else f" above {meta.gt}"
        what += "" if meta.le in (None, _FINITE) else f" up to {meta.le}"
        what += ", a power of two" if name == "span_bytes" else ""
        what += ", or None" if optional else ""
    return ConfigError(f"{variable or name}={value!r} is not allowed: {what}")


def _parse(name: str, variable: str) -> object:
    """The value of an environment variable as its field's type; `Config` checks it later."""
    text = os.environ[variable].strip()
    kind, _, optional = _constraints(name)
    if optional and text.lower() == "none":
        return None
    try:
        return parse_size(text) if "_bytes" in name else kind(text)
    except ValueError as error:  # ConfigError is one
        raise _refused(name, text, variable) from error
