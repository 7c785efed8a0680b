"""Checks the options `retry_exceptions=` and `env=`, and brings them into the form that is sent;
checks the names that users give to actors and Groups.

It must never know: who uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.fields import ENV_BYTES_MAX, NAME_CHARS_MAX

if TYPE_CHECKING:
    from hoplite_mp.protocol.birth import Environment

__all__ = ["UNUSED", "check_name", "check_values", "refuse_unused"]

_OF_ACTORS = ("restarts", "checkpoint", "detached", "get_if_exists")
_OF_TASKS = ("retries", "timeout", "retry_exceptions", "concurrency", "priority", "resources")
# Options that would have no effect on a call. The first call that uses each is named in errors.
UNUSED: dict[str, tuple[str, ...]] = {
    "submit": ("env", *_OF_ACTORS, "buffersize"),
    "map": ("env", *_OF_ACTORS, "buffersize"),
    "stream": ("env", *_OF_ACTORS, "concurrency"),
    "run": ("env", *_OF_ACTORS, "buffersize", *_OF_TASKS),
    "executor": (*_OF_ACTORS, "buffersize"),
    "spmd": (*_OF_ACTORS, "buffersize"),
    "actor": ("priority",),
    "group": ("env", "node", "name", *_OF_ACTORS, "buffersize", *_OF_TASKS),
}
_USERS = {
    **dict.fromkeys(_OF_ACTORS, "actor()"),
    **dict.fromkeys(_OF_TASKS, "submit() and map()"),
    "buffersize": "stream(); map() has an argument of that name",
    "timeout": "submit() and map(); run() and group() have an argument of that name",
    "node": "calls that start something on a node",
    "name": "tasks and actors; group() has an argument of that name",
}


def check_name(name: str, whose: str) -> None:
    """ValueError if messages cannot carry that name. whose: "a group" or "an actor"."""
    if len(name) > NAME_CHARS_MAX:
        raise ValueError(f"{whose}'s name of {len(name)} characters: at most {NAME_CHARS_MAX}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"name={name!r}: {whose}'s name must be encodable as UTF-8, and lone surrogates are "
            "not; they come from bytes that were decoded with surrogateescape, as in file names; "
            "replace them"
        ) from None


def check_values(changes: dict[str, Any]) -> None:
    """Checks those of these options that are given. TypeError, ValueError."""
    for name in ("detached", "get_if_exists"):
        if name in changes and not isinstance(changes[name], bool):
            raise TypeError(f"{name}={changes[name]!r}: it must be True or False")
    if "retry_exceptions" in changes:
        changes["retry_exceptions"] = _exceptions(changes["retry_exceptions"])
    if "env" in changes:
        changes["env"] = _environment(changes["env"])


def _exceptions(given: Any) -> tuple[type[Exception], ...]:
    """A class or a tuple or list of classes, as `except` takes them; returned as a tuple."""
    found = given if isinstance(given, (tuple, list)) else () if given is None else (given,)
    for one in found:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise TypeError(
                f"retry_exceptions={given!r}: it must be a class of exceptions (subclasses of "
                f"Exception), or a tuple of them; {one!r} is none"
            )
    return tuple(dict.fromkeys(found))


def _environment(given: Any) -> Environment:
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise TypeError(f"env={given!r}: it must be a dict of names and values, or None")
    for name, value in given.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise TypeError(
                f"env has {name!r}: {value!r}; names and values must be texts, a value None "
                "removes the variable"
            )
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise ValueError(f"env has {name!r}: no environment can hold that name, or its value")
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
            f"env has {nbytes} bytes: at most {ENV_BYTES_MAX} travel to a process that starts; "
            "put large values into a file, or into initargs"
        )
    return tuple(sorted(given.items()))


def refuse_unused(options: Any, call: str) -> None:
    """ValueError if an option was given that would have no effect on that call."""
    defaults = type(options)()
    for name in UNUSED[call]:
        if getattr(options, name) == getattr(defaults, name):
            continue
        if name != "env":
            raise ValueError(
                f"options({name}=) has no effect on {call}(): it is for {_USERS[name]}; make a "
                "view without it, c.options(...)"
            )
        raise ValueError(
            f"env= is for processes of their own, which executor(), actor() and spmd() start; "
            f"{call}() uses workers that run already: use c.options(env=...).executor(), or "
            "executor(initializer=)"
        )
