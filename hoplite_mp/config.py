"""Configuration limits, with the effect of a higher and of a lower value.

Nothing in hoplite_mp grows, waits or retries without a bound. User-settable bounds are fields of
Config; all others are constants at the top of the file that uses them. A field's name ends in its
unit, followed by `_max` for an upper limit. Arguments take precedence over the environment
(`HOPLITE_MP_<FIELD>`), and the environment over the defaults.
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

# Number of objects and results whose latest plans (lists of transfers) the manager keeps for
# `Cluster.explain`. With a higher value, older transfers can be explained. A plan takes about
# 1 KiB, or 100 KiB for a thousand nodes.
PLAN_RECORDS_MAX = 256

# Types of fields. Error messages are derived from the constraints in these annotations.
_FINITE = sys.float_info.max
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=_FINITE)]
Above0 = Annotated[float, Meta(gt=0, le=_FINITE)]
Directory = Annotated[str, Meta(min_length=1, description="the path of a directory")]
Resources = Annotated[str, Meta(pattern="=", description='a list such as "gpu=2,disk=0.5"')]
Command = Annotated[
    str,
    Meta(description="a command that contains {host}, and {arguments} as a separate word"),
]

_PREFIX = "HOPLITE_MP_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Parses a size such as "2GiB", "512 MB", "1.5g" or "65536". Returns a number of bytes.

    Units with an "i" are powers of 1024, others powers of 1000 (IEC 80000-13).
    """
    if not isinstance(text, (str, bool)):
        with contextlib.suppress(TypeError):
            return operator.index(text)
    match = _SIZE.fullmatch(text.strip() if isinstance(text, str) else "")
    if match is None:
        raise ConfigError(
            f"invalid size {text!r}: use a number of bytes, or a number with a unit, such as "
            '"65536", "512MiB" or "2GiB"'
        )
    number, unit, binary = match.groups()
    step = 1024 if binary else 1000
    factor: int = step ** _POWER[(unit or "").lower()]
    return round(float(number) * factor)


# Fields renamed in 0.1. The old names work until 0.2, with a DeprecationWarning.
RENAMED = {
    "beat_interval_s": "heartbeat_interval_s",
    "silence_s": "heartbeat_timeout_s",
    "unauthenticated_max": "pending_handshakes_max",
    "carried_array_bytes_min": "captured_array_bytes_min",
}

# Fields that became arguments of `init` in integrations.ray and integrations.dask. As fields, they
# work until 0.2, with a DeprecationWarning.
MOVED = {"foreign_hold_s": "ref_hold_s", "beside_idle_s": "node_idle_s"}


def _warn_moved(old: str, name: str, value: object, *, stacklevel: int) -> float:
    """Warns about a field that became an argument. Returns its checked value."""
    text = f"{name} has become {MOVED[old]}= of init() in integrations.ray and integrations.dask"
    warnings.warn(
        f"{text}; the old name works until hoplite_mp 0.2",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
    return check_seconds(name, value)


def check_seconds(name: str, value: object) -> float:
    """Returns the value as a float. Raises ConfigError unless it is finite and at least 0. `name`:
    the name of the setting, for the message."""
    plain = _plain(value)
    if isinstance(plain, (int, float)) and not isinstance(value, bool) and 0 <= plain <= _FINITE:
        return float(plain)
    raise ConfigError(f"{name}={value!r} is not allowed: use a finite number from 0")


def _warn_renamed(old: str, prefix: str = "", *, stacklevel: int) -> str:
    """Warns about an old name. Returns the new name. `stacklevel`: as for `warnings.warn`, counted
    from the caller of this function."""
    new = RENAMED[old]
    names = (prefix + name.upper() for name in (old, new)) if prefix else (old, new)
    text = "{} is now called {}; the old name works until hoplite_mp 0.2".format(*names)
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
    return new


class _ConfigMeta(type):
    """Accepts old names of fields, and appends the fields' docstrings to the class's `__doc__`. The
    docstrings are read from the source when `__doc__` is read, so they cost nothing at import."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for old in RENAMED.keys() & values.keys():  # dataclasses.replace passes both names
            values[_warn_renamed(old, stacklevel=2)] = values.pop(old)
        given = {old: values.pop(old) for old in MOVED.keys() & values.keys()}
        instance = super().__call__(*args, **values)
        for old, value in given.items():
            object.__setattr__(
                instance, "_" + MOVED[old], _warn_moved(old, old, value, stacklevel=2)
            )
        return instance

    @property
    def __signature__(cls) -> Any:
        """The signature of `__init__`, without the constraints in its annotations. If this property
        were missing, `inspect.signature` would show the signature of `__call__`."""
        import inspect

        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        shown = []
        for parameter in list(own.parameters.values())[1:]:
            kind, _, optional = _constraints(parameter.name)
            shown.append(parameter.replace(annotation=kind | None if optional else kind))
        return own.replace(parameters=shown)

    @property
    def __doc__(cls) -> str | None:  # type: ignore[override]
        own = cls.__dict__.get("__doc__")
        if not hasattr(cls, "__match_args__"):  # `dataclass` is still creating the class
            return own or cls.__name__  # `dataclass` would replace an empty docstring
        if own is None:  # python -OO
            return None
        import ast
        import inspect
        import textwrap

        own = inspect.cleandoc(own)
        try:
            tree = ast.parse(inspect.getsource(sys.modules[__name__]))
        except (KeyError, OSError, SyntaxError, TypeError):  # no source file
            return own
        (body,) = [
            statement
            for statement in tree.body
            if isinstance(statement, ast.ClassDef) and statement.name == cls.__name__
        ]
        parts = [own]
        for field, below in itertools.pairwise(body.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)):
                continue
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                default = "" if field.value is None else f" = {ast.unparse(field.value)}"
                text = textwrap.indent(inspect.cleandoc(below.value.value), "    ")
                parts.append(f"{ast.unparse(field.target)}{default}\n{text}")
        return "\n\n".join(parts)


class _MovedFields:
    """The values of fields that became arguments, if they were passed by their old names."""

    __slots__ = tuple("_" + name for name in MOVED.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(_MovedFields, metaclass=_ConfigMeta):
    """The limits of one cluster. Immutable; use `dataclasses.replace` to make a changed copy.

    Raises
    ------
    ConfigError
        A value has the wrong type or is out of range; the message states the allowed values.

    Examples
    --------
    >>> config = hoplite_mp.Config(retries=0, heartbeat_timeout_s=5)
    >>> config.retries
    0
    """

    __module__ = "hoplite_mp"  # as users import it

    # -- memory --------------------------------------------------------------------------------

    small_object_bytes_max: Annotated[int, Meta(ge=64)] = 64 * KIB
    """Payloads up to this size share a span with others; larger payloads get a separate block.
    Higher: fewer requests to the node, more unused bytes in partly filled spans.
    Lower: less waste, but every larger object costs one round trip to the node."""

    span_bytes: Annotated[int, Meta(ge=SPAN_BYTES_MIN)] = 1 * MIB
    """Size of a span, a block for small objects that is leased to one client at a time. Spans are
    smaller if spans of this size for all processes would take more than half of the store.
    Higher: fewer leases per second. Lower: less memory tied up by clients that put few objects."""

    captured_array_bytes_min: Count = 1 * MIB
    """If a function is sent by value, arrays of at least this size in its globals, closure and
    defaults are stored as objects, which are sent again only after a change. A warning lists such
    globals. Higher: more arrays are serialized with each task that uses them.
    Lower: more objects; each is checked at every submit, which takes about 5 microseconds."""

    stream_bytes_max: Count = 128 * MIB
    """Number of bytes in unread items at which a stream's generator pauses, unless
    options(buffersize=) limits the number of items. Each item counts as at least 4 KiB.
    Higher: generator and reader wait for each other less often. Lower: each stream takes less of
    the store."""

    queue_item_bytes_max: Count = 16 * KIB
    """Items of a Queue up to this size are sent inside messages and kept in the memory of the
    queue's actor; larger items are objects in the store of the host that puts them.
    Higher: fewer objects, and fewer items are lost with a host. Lower: less data passes through
    the actor, which copies it twice and blocks all users of the queue meanwhile."""

    put_wait_s: Seconds = 10.0
    """How long a put waits for space in a full store before StoreFullError.
    Higher: short bursts succeed. Lower: a program that leaks refs fails sooner."""

    error_reserve_bytes: Count = 1 * MIB
    """Extra space for errors when the store is full, so that a task can report its failure; at most
    a sixteenth of the store's limit. Each error takes at least 4 KiB.
    Higher: more errors are stored completely. Lower: less memory is used beyond memory=. An error
    for which there is no space keeps its type and the beginning of its text."""

    error_bytes_max: Annotated[int, Meta(ge=4 * KIB)] = 64 * KIB
    """Maximum size of an exception, with its traceback, that is stored in the reserve. A larger
    exception waits for space like any value, and is truncated to this size if there is no space.
    Higher: long tracebacks stay complete. Lower: the reserve holds more errors."""

    memory_reserve_bytes: Count = 256 * MIB
    """Available memory (MemAvailable) that the store leaves free, at most an eighth of the smaller
    of RAM and the control group's limit.
    Higher: less risk from the out-of-memory killer. Lower: more objects fit on a dedicated host."""

    memory_bytes: Annotated[int, Meta(ge=MIB)] | None = None
    """Size limit of the store; None: a third of the smaller of RAM and the control group's limit.
    Higher: more objects before puts wait or spill. Lower: more memory for the tasks' own arrays."""

    spill_dir: Directory | None = None
    """Directory for spilled objects when the store is full; None: the first of TMPDIR, /var/tmp and
    the working directory that is on a disk. The file has no name, and disappears with the node.
    A faster disk: shorter waits when the store is full."""

    spill_bytes_max: Count | None = None
    """Maximum number of bytes in spill_dir; None: the size of the disk.
    Higher: larger data sets. Lower: more space for other users of the disk."""

    memory_idle_s: Seconds = 30.0
    """How long freed memory stays unused before it is returned to the system. The return may take
    up to twice this time. Higher: bursty programs reuse pages. Lower: other programs get the memory
    sooner, and the next burst pays for new pages."""

    populate_ahead_bytes: Count = 128 * MIB
    """How far ahead of demand the node allocates pages.
    Higher: more large puts run at memory speed. Lower: less memory is allocated in advance; 0
    leaves every page fault to the process that writes."""

    # -- waiting -------------------------------------------------------------------------------

    spin_us_max: Annotated[int, Meta(ge=0, le=10_000)] = 50
    """How long a waiter spins before it blocks. It blocks immediately if the number of processes
    that are waiting for each other exceeds the number of cores.
    Higher: lower latency for short tasks, at the cost of a busy core. Lower: cores stay idle, and
    every wait costs a system call and a wake-up."""

    drain_interval_s: Annotated[float, Meta(gt=0, le=60)] = 0.25
    """Interval at which a process collects freed and finished entries of its tables in shared
    memory without being woken.
    Higher: less background work. Lower: memory is freed sooner in a process that only waits."""

    connect_timeout_s: Seconds = 10.0
    """How long to try to reach a manager at the given address.
    Higher: a cluster that is still starting is found. Lower: a wrong address fails sooner."""

    start_timeout_s: Above0 = 30.0
    """Timeout for the start of a host's own processes.
    Higher: slow disks and loaded machines succeed. Lower: a broken installation fails sooner."""

    shutdown_timeout_s: Seconds = 5.0
    """Grace period for processes at shutdown before they are killed. Before this period, unread
    results are loaded from the spill file for at most the same time, so that they stay readable.
    Higher: results and output are complete. Lower: shutdown is fast even if a process hangs."""

    # -- tasks ---------------------------------------------------------------------------------

    # a header word has 8 bits for the attempt; half of their values are unused
    retries: Annotated[int, Meta(ge=0, le=127)] = 3
    """Number of retries of a task after the death of its worker. Exceptions are retried only with
    options(retry_exceptions=).
    Higher: work survives an unstable host. Lower: a task that kills its worker fails sooner."""

    lineage_bytes_max: Count = 64 * MIB
    """Several hosts: memory on each host for the lineage of results. Lineage consists of functions
    and by-value arguments (in the store), and of 1 KiB for each result above 64 KiB that a process
    holds. Beyond the limit, the oldest entries are dropped; a lost result without lineage cannot be
    reconstructed.
    Higher: longer chains of tasks and larger arguments survive the death of a host. Lower: less of
    the store is used; 0: no result is reconstructed."""

    start_attempts_max: Annotated[int, Meta(ge=2)] = 5
    """Number of consecutive failed starts of a pool's workers after which waiting tasks fail with
    WorkerLostError. Starts are still retried, and after a successful start the pool works again.
    Higher: a longer shortage of memory is only a delay. Lower: waiting tasks fail sooner, with the
    reason."""

    restart_pause_s: Above0 = 0.1
    """Pause before the third consecutive attempt to start a worker; there is none before the
    second. It doubles with each further attempt, up to restart_pause_s_max.
    Higher: less load from workers that die at start. Lower: faster recovery from a short
    problem."""

    restart_pause_s_max: Above0 = 5.0
    """Maximum pause between two attempts to start a worker. A worker that has run for this time
    counts as started.
    Higher: less load on a host with problems. Lower: faster recovery afterwards."""

    cancel_grace_s: Seconds = 2.0
    """Grace period for an interrupted task before its worker is killed.
    Higher: tasks can close files and release locks. Lower: cancelling is faster."""

    # a host has 256 client slots
    blocked_workers_max: Annotated[int, Meta(ge=0, le=200)] = 128
    """Maximum number of extra workers that a pool may start to replace workers blocked inside a
    task.
    Higher: deeper trees of tasks and larger groups make progress. Lower: fewer processes; if all
    workers are blocked at the limit, the tasks that they have submitted fail with
    WorkerLostError."""

    nested_depth_max: Annotated[int, Meta(ge=1, le=200)] = 32
    """Maximum depth of nested tasks in a worker: a task that waits for a task that it has submitted
    runs it in place. Recursion is not limited: deeper tasks run in other workers, and in extra
    workers up to blocked_workers_max.
    Higher: deep trees of tasks need fewer processes, but deeper stacks. Lower: extra workers start
    sooner."""

    resources: Resources | None = None
    """Resources of this host for options(resources=), for example "gpu=2,disk=0.5"; None: none.
    Cluster(resources=) and the option --resources take precedence."""

    resource_wait_s: Seconds = 30.0
    """How long tasks wait for another node after the loss of the last node with the required
    resources, before they fail with NodeLostError.
    Higher: tasks survive the restart of a host. Lower: such tasks fail sooner."""

    # _protocol/output.py: LINE_BYTES_MAX
    output_line_bytes_max: Annotated[int, Meta(ge=80, le=MIB)] = 64 * KIB
    """Maximum length of a line in a worker's output; longer lines are split.
    Higher: long lines stay in one piece. Lower: less memory per worker in the node."""

    output_wait_s: Seconds = 10.0
    """Several hosts: how long workers' output is kept for a driver that does not read it. After
    this time the output is dropped, and a line reports the number of dropped lines. On one host
    there is no such limit.
    Higher: a suspended driver misses nothing. Lower: workers with a lot of output are free for
    other programs sooner."""

    blas_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Number of threads for BLAS, OpenMP, Numba and torch in each process of a pool or actor; None:
    the values of OMP_NUM_THREADS and similar variables, otherwise the number of cores divided by
    the number of the pool's processes, and 1 in an actor. Higher: a single matrix product is
    faster. Lower: processes do not compete for cores."""

    await_read_bytes_max: Count = 256 * KIB
    """Maximum size of a value that `await` reads in the event loop. Larger values, except arrays
    that need no copy, are read in a thread.
    Higher: fewer thread switches. Lower: the loop is blocked for a shorter time."""

    await_threads_max: Annotated[int, Meta(ge=1)] = 8
    """Maximum number of threads in a process in which `await` reads remote, spilled and large
    values. They are started on demand.
    Higher: more values are read at a time. Lower: fewer threads."""

    # -- collectives and groups ----------------------------------------------------------------

    reduce_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Number of threads for reductions in the node; None: one for each core.
    Higher: large arrays are reduced at memory speed. Lower: tasks keep more of the cores."""

    collective_refs_max: Annotated[int, Meta(ge=1, le=32_768)] = 32_768
    """Maximum number of refs in one collective operation. They are sent to the node in one packet,
    9 bytes each; an unprivileged process can send at most 416 KiB in a packet.
    Lower: a wrong list is refused before it costs memory in the node and the manager."""

    group_wait_s: Seconds = 30.0
    """How long a Group waits for missing members before it fails.
    Higher: members may start late. Lower: an incomplete Group fails sooner."""

    group_members_max: Annotated[int, Meta(ge=1, le=64)] = 64
    """Maximum size of a Group, at most 64, because rank masks have 64 bits.
    Lower: a wrong size is refused before it fills the host with waiting workers."""

    group_late_calls_max: Annotated[int, Meta(ge=1)] = 4
    """How many calls with a deadline a rank may fall behind before the other ranks wait for it.
    Higher: ranks may be late for longer, but each rank keeps the results of that many calls."""

    group_buffer_bytes_max: Count = 8 * MIB
    """Maximum size of an array that Group calls on one host pass in call buffers. A Group keeps two
    buffers for each rank and each size that it has used. Larger arrays are passed as objects, and
    so are all arrays if the store has no space for buffers.
    Higher: larger calls need no objects, but a Group takes more of the store. 0: no buffers."""

    # -- diagnostics ---------------------------------------------------------------------------

    trace_events_max: Annotated[int, Meta(ge=1)] = 500_000
    """Maximum number of events that a node keeps in a trace: this many from its processes (80 bytes
    each), and this many of its own (transfers, collectives, spilling). Older events are dropped and
    counted.
    Higher: longer traces of short tasks are complete. Lower: less memory in the node, and a smaller
    file."""

    # -- other hosts ---------------------------------------------------------------------------

    handshake_timeout_s: Above0 = 5.0
    """Timeout for the handshake on a connection. On the connecting side, it starts with the
    server's first byte, because the server may queue connections.
    Higher: slow and distant hosts can connect. Lower: silent connections end sooner."""

    heartbeat_interval_s: Above0 = 0.2
    """Interval of the heartbeats between nodes and the manager.
    Higher: less work in a cluster with many hosts. Lower: heartbeat_timeout_s can be shorter."""

    heartbeat_timeout_s: Above0 = 1.5
    """How long a host may be silent before it is declared dead. If four times the host's longest
    silence in the last minute is longer, that time applies, up to eight times this value. In a
    cluster with a standby, this is also the manager's lease.
    Higher: no host is lost because of a short pause. Lower: other hosts continue sooner after a
    death."""

    pending_handshakes_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Maximum number of concurrent unauthenticated connections to each listener; each can take
    about 100 KiB of memory. Four times as many can be queued. Only hosts that exceed their share
    lose connections.
    Higher: more hosts can join simultaneously. Lower: unauthenticated peers cost less memory."""

    hosts_command: Command = "ssh -o BatchMode=yes {host} hoplite-mp {arguments}"
    """Command that starts a node for Cluster(hosts=). It is split into words like a shell command,
    but runs without a shell. {host} is replaced by an element of hosts=, and the word {arguments}
    by the arguments of hoplite-mp. The command must run as long as hoplite-mp, and must forward its
    standard input to hoplite-mp."""

    hosts_wait_s: Seconds = 60.0
    """How long Cluster(hosts=) waits for all nodes to join before NodeLostError.
    Higher: slow hosts can join. Lower: a missing host is an error sooner."""

    def __getattr__(self, name: str) -> Any:
        if name in RENAMED:
            return getattr(self, _warn_renamed(name, stacklevel=2))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __post_init__(self) -> None:
        for field in fields(self):  # converts NumPy's numbers to Python's
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
                f"small_object_bytes_max={self.small_object_bytes_max} is too large: a span must "
                f"hold two objects, so at most span_bytes // 2 = {self.span_bytes // 2}"
            )
        if self.heartbeat_timeout_s < 3 * self.heartbeat_interval_s:
            shortest = f"three times heartbeat_interval_s={self.heartbeat_interval_s:g}"
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s:g} is too short: use at least "
                f"{shortest}"
            )

    @classmethod
    def from_environment(cls, **overrides: Any) -> "Config":
        """Returns the limits from `overrides`, then ``HOPLITE_MP_<FIELD>``, then the defaults.

        In environment variables, "none" means None, and sizes may have a unit:
        `HOPLITE_MP_MEMORY_BYTES=2GiB`.

        Parameters
        ----------
        **overrides
            Values of fields; None means "not given".

        Raises
        ------
        ConfigError
            A value is not allowed. The message names the field or the variable.
        TypeError
            A field does not exist.

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
    """Converts numbers of other types, such as NumPy's, to int or float. Returns other values
    unchanged."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def _constraints(name: str) -> tuple[type, Meta, bool]:
    """Returns the type of a field, its constraints, and whether None is allowed."""
    first, *others = get_args(_TYPES[name])
    if isinstance(others[0], Meta):
        return first, others[0], False
    return *get_args(first), True


def _refused(name: str, value: object, variable: str = "") -> ConfigError:
    """The error for an invalid value of a field, or of its environment variable."""
    kind, meta, optional = _constraints(name)
    what = meta.description or ("a whole number" if kind is int else "a finite number")
    if kind is not str:
        what += f" from {meta.ge}" if meta.gt is None else f" above {meta.gt}"
        what += "" if meta.le in (None, _FINITE) else f" up to {meta.le}"
        what += ", a power of two" if name == "span_bytes" else ""
        what += ", or None" if optional else ""
    return ConfigError(f"{variable or name}={value!r} is not allowed: use {what}")


def _parse(name: str, variable: str) -> object:
    """Returns the value of an environment variable, converted to the type of its field."""
    text = os.environ[variable].strip()
    kind, _, optional = _constraints(name)
    if optional and text.lower() == "none":
        return None
    try:
        return parse_size(text) if "_bytes" in name else kind(text)
    except ValueError as error:  # includes ConfigError
        raise _refused(name, text, variable) from error
