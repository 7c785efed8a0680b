"""Checks the options `retry_exceptions=`, `retry_delay=` and `env=`, and converts them to the form
in which they are sent. Also checks the names that users give to actors and Groups.
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hoplite_mp._client.memory import whole
from hoplite_mp._protocol.fields import ENV_BYTES_MAX, NAME_CHARS_MAX

if TYPE_CHECKING:
    from hoplite_mp._protocol.spawning import Environment

__all__ = [
    "PRIORITY_MAX",
    "UNUSED",
    "RetryDelay",
    "check_name",
    "check_values",
    "checked_priority",
    "refuse_unused",
    "retry_pause",
]


RetryDelay: TypeAlias = tuple[float, float, float]  # (first, factor, max), with times in seconds
RETRY_DELAY_S_MAX = 1e6  # eleven days
RETRY_FACTOR_MAX = 1e6

_OF_ACTORS = ("restarts", "checkpoint", "detached", "get_if_exists")
_OF_TASKS = (
    "retries", "timeout", "retry_exceptions", "retry_delay", "concurrency", "priority", "resources",
)  # fmt: skip
# Call -> the options that have no effect on it.
UNUSED: dict[str, tuple[str, ...]] = {
    "submit": ("env", *_OF_ACTORS, "buffersize"),
    "map": ("env", *_OF_ACTORS, "buffersize"),
    "stream": ("env", *_OF_ACTORS, "concurrency", "retry_delay"),
    "run": ("env", *_OF_ACTORS, "buffersize", *_OF_TASKS),
    "executor": (*_OF_ACTORS, "buffersize"),
    "spmd": (*_OF_ACTORS, "buffersize", "retry_delay"),
    "actor": ("priority", "retry_delay"),
    "group": ("env", "node", "name", *_OF_ACTORS, "buffersize", *_OF_TASKS),
}
_USERS = {  # option -> the calls that use it, for error messages
    **dict.fromkeys(_OF_ACTORS, "actor()"),
    **dict.fromkeys(_OF_TASKS, "submit() and map()"),
    "buffersize": "stream(); map() has an argument with that name",
    "timeout": "submit() and map(); run() and group() have an argument with that name",
    "node": "calls that start something on a node",
    "name": "tasks and actors; group() has an argument with that name",
}


def check_name(name: str, whose: str) -> None:
    """Raises ValueError if that name is too long or cannot be encoded. whose: "a group" or "an
    actor"."""
    if len(name) > NAME_CHARS_MAX:
        raise ValueError(
            f"{whose}'s name has {len(name)} characters: at most {NAME_CHARS_MAX} are allowed"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"name={name!r}: {whose}'s name must be encodable as UTF-8, and lone surrogates are "
            "not; replace them (they result from decoding bytes, such as file names, with "
            "surrogateescape)"
        ) from None


def check_values(changes: dict[str, Any]) -> None:
    """Checks and converts this module's options in `changes`. Raises TypeError or ValueError."""
    for name in ("detached", "get_if_exists"):
        if name in changes and not isinstance(changes[name], bool):
            raise TypeError(f"{name}={changes[name]!r}: it must be True or False")
    if "retry_exceptions" in changes:
        changes["retry_exceptions"] = _exceptions(changes["retry_exceptions"])
    if "retry_delay" in changes:
        changes["retry_delay"] = _retry_delay(changes["retry_delay"])
    if "env" in changes:
        changes["env"] = _environment(changes["env"])


def _exceptions(given: Any) -> tuple[type[Exception], ...]:
    """Checks a class, or a tuple or list of classes, as for `except`. Returns a tuple."""
    found = given if isinstance(given, (tuple, list)) else () if given is None else (given,)
    for one in found:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise TypeError(
                f"retry_exceptions={given!r}: it must be an exception class (a subclass of "
                f"Exception), or a tuple of them; {one!r} is not one"
            )
    return tuple(dict.fromkeys(found))


def _retry_delay(given: Any) -> RetryDelay | None:
    """Checks a number of seconds, or (first, factor, max). Returns the latter form; None for no
    delay."""
    form = "it must be a number of seconds, or (first, factor, max) with two numbers of seconds"
    given = 0.0 if given is None else given
    found = given if isinstance(given, (tuple, list)) else (given, 1.0, given)
    for one in found:
        if isinstance(one, (bool, np.bool_)) or not isinstance(one, numbers.Real):
            raise TypeError(f"retry_delay={given!r}: {form}")
    if len(found) != 3:
        raise ValueError(f"retry_delay={given!r}: {form}")
    first, factor, most = map(float, found)
    if not (0 <= first <= most <= RETRY_DELAY_S_MAX and 1 <= factor <= RETRY_FACTOR_MAX):
        raise ValueError(
            f"retry_delay={given!r}: {form}; seconds from 0 to {RETRY_DELAY_S_MAX:g}, max at "
            f"least first, and a factor from 1 to {RETRY_FACTOR_MAX:g}"
        )
    return (first, factor, most) if first > 0 else None


def retry_pause(delay: RetryDelay | None, tries: int) -> float:
    """The seconds between the end of a task's try number `tries` and the next try. Must equal
    `Tasks.retry_pause`, which the node uses."""
    pause, factor, most = delay or (0.0, 1.0, 0.0)
    for _ in range(1, tries):
        pause = min(pause * factor, most)
    return pause


def _environment(given: Any) -> Environment:
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise TypeError(f"env={given!r}: it must be a dict of names and values, or None")
    for name, value in given.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise TypeError(
                f"env has {name!r}: {value!r}; names and values must be strings; the value None "
                "removes the variable"
            )
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise ValueError(
                f"env has {name!r}: an environment cannot contain that name or its value"
            )
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"env has {name!r}: {value!r}, which has lone surrogates; names and values must be "
                "encodable as UTF-8"
            ) from None
    texts = [part for pair in given.items() for part in pair if part is not None]
    nbytes = sum(len(part.encode(errors="replace")) for part in texts)
    if nbytes > ENV_BYTES_MAX:
        raise ValueError(
            f"env has {nbytes} bytes: at most {ENV_BYTES_MAX} can be sent to a new process; "
            "put large values into a file, or into initargs"
        )
    return tuple(sorted(given.items()))


def refuse_unused(options: Any, call: str) -> None:
    """Raises ValueError if an option was given that would have no effect on that call."""
    defaults = type(options)()
    for name in UNUSED[call]:
        if getattr(options, name) == getattr(defaults, name):
            continue
        if name != "env":
            raise ValueError(
                f"options({name}=) has no effect on {call}(): it is for {_USERS[name]}; create a "
                "view without it, c.options(...)"
            )
        raise ValueError(
            f"env= is for the new processes that executor(), actor() and spmd() start; "
            f"{call}() uses existing workers: use c.options(env=...).executor(), or "
            "executor(initializer=)"
        )


PRIORITY_MAX = (1 << 31) - 1  # the minimum is -PRIORITY_MAX


def checked_priority(given: Any) -> int:
    """The priority as an int. Raises ValueError if it is not an integer, or out of range."""
    priority = whole(given)
    if priority is None or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise ValueError(
            f"priority={given!r}: it must be a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}"
        )
    return priority
