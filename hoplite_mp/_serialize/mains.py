"""The `__main__` of a worker: a module whose globals are those of its driver's `__main__`.

Code in tasks refers to `__main__` by name: pickle looks up classes and functions in it, and
dataclasses and `typing` look up the names in annotations. Workers never run a script, so the
module contains only definitions that were sent with functions and classes by value. Several
drivers may share a worker. Each driver has its own module, and `sys.modules` contains the module
of the driver whose task is running.
"""

from __future__ import annotations

import re
import sys
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAIN_NAMES = frozenset({"__main__", "__mp_main__"})
AUDIENCES_MAX = 256  # maximum number of drivers' modules that are kept
TEXT_CHARS_MAX = 200  # longer texts are not annotations
_NAME = re.compile(r"[^\W\d]\w*")


class Main(types.ModuleType):
    """Replaces a driver's `__main__` in a worker."""

    @property
    def __file__(self) -> str:  # type: ignore[override]
        """The file of the script. It is hidden, because otherwise processes that a task spawns
        would run the script. Only `inspect` gets it, to find the text of a class. Functions can
        still use the global variable."""
        if sys._getframe(1).f_globals.get("__name__") == "inspect":
            name = vars(self).get("__file__")
            if name is not None:
                return str(name)
        raise AttributeError(f"{self!r} has no file")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self!r} has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"<module {self.__name__!r} in a worker, which does not run the script: it has only "
            "the definitions that arrived with functions, arguments and classes>"
        )


class _Mains:
    """The modules that may be `__main__` in this process."""

    def __init__(self) -> None:
        self.empty: Main | None = None  # for a driver from which no definition has arrived yet
        self.current: Main | None = None  # None: this process is not a worker
        self.output_owner = 0
        self.of_output_owner: dict[int, Main] = {}
        # Keeps alive the globals of the functions that have started the worker.
        self.template: Any = None

    def install(self, module: Main | None) -> None:
        """Installs the module as `__main__`; None: no change."""
        if module is None or module is self.current:
            return
        self.current = sys.modules["__main__"] = module
        if module.__name__ == "__mp_main__":  # the driver was itself spawned by multiprocessing
            sys.modules["__mp_main__"] = module
        else:
            sys.modules.pop("__mp_main__", None)

    def turn_to(self, module: Main) -> None:
        """Makes the module `__main__`, now and at the beginning of each later task from the
        current driver."""
        self.install(module)
        self.of_output_owner.pop(self.output_owner, None)
        self.of_output_owner[self.output_owner] = module
        if len(self.of_output_owner) > AUDIENCES_MAX:
            del self.of_output_owner[next(iter(self.of_output_owner))]


mains = _Mains()


def begin(output_owner: int) -> None:
    """Installs an empty `__main__` when a worker starts. Definitions arrive later."""
    mains.template = sys.modules["__main__"]
    mains.empty = Main("__main__")
    mains.output_owner = output_owner
    mains.install(mains.empty)


def turn_to_output_owner(output_owner: int) -> None:
    """Switches `__main__` to the module of that driver."""
    mains.output_owner = output_owner
    mains.install(mains.of_output_owner.get(output_owner, mains.empty))


# -- names that code does not load as globals --------------------------------------------------

# Code -> the names in its strings that may be annotations, and the names that it may look up in
# `__main__`
_names: weakref.WeakKeyDictionary[types.CodeType, tuple[frozenset[str], frozenset[str]]] = (
    weakref.WeakKeyDictionary()
)


def hidden_names(
    scope: dict[str, Any], code: types.CodeType | None, annotations: Any
) -> Iterator[str]:
    """Yields the globals that code or annotations refer to without loading them: in the text of an
    annotation, or as an attribute of `__main__`."""
    in_texts: set[str] = set()
    if code is not None:
        in_texts |= _names_of(code)[0]
        yield from (name for name in named_in_main(code) if name in scope)
    if type(annotations) is dict:
        in_texts.update(*(_in_text(text) for text in annotations.values() if type(text) is str))
    yield from (name for name in in_texts if name in scope and _annotates(scope[name]))


def named_in_main(code: types.CodeType) -> frozenset[str]:
    """The names that code may look up as attributes of `__main__`."""
    return _names_of(code)[1]


def _names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    known = _names.get(code)
    if known is None:
        known = _names[code] = _names_in(code)
    return known


def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    texts: set[str] = set()
    attributes: set[str] = set()
    codes = [code]
    nested = any(isinstance(const, types.CodeType) for const in code.co_consts)
    for item in codes:
        consts = list(item.co_consts)
        attributes.update(item.co_names)
        for const in consts:
            if isinstance(const, types.CodeType):
                codes.append(const)
            elif isinstance(const, tuple):
                consts.extend(const)
            elif type(const) is str:
                texts.add(const)
    named = "__main__" in texts or "__main__" in attributes
    # Only code that defines a class or function has annotations.
    annotated = frozenset().union(*map(_in_text, texts)) if nested else frozenset[str]()
    return annotated, frozenset(attributes) if named else frozenset()


def _in_text(text: str) -> frozenset[str]:
    return frozenset(_NAME.findall(text)) if len(text) <= TEXT_CHARS_MAX else frozenset()


def _annotates(value: Any) -> bool:
    """Whether an annotation can name this value: a class, a module, or an object of `typing`."""
    kinds = type, types.ModuleType, types.GenericAlias, types.UnionType
    return isinstance(value, kinds) or type(value).__module__ == typing.__name__


# -- children ----------------------------------------------------------------------------------


def refuse_in_children(context: Any, process: Any) -> None:
    """Makes multiprocessing refuse to send definitions in `__main__` to children that tasks spawn,
    because such children cannot import these definitions. Forked children have them."""
    for kind in (context.SpawnProcess, context.ForkServerProcess):
        kind._Popen = staticmethod(_refusing(kind._Popen, process))


def _refusing(popen: Callable[[Any], Any], process: Any) -> Callable[[Any], Any]:
    def start(child: Any) -> Any:
        reduction: Any = sys.modules["multiprocessing.reduction"]
        if "reducer_override" not in vars(reduction.ForkingPickler):
            reduction.ForkingPickler.reducer_override = _override(process)
        return popen(child)

    return start


def _override(process: Any) -> Callable[[Any, Any], Any]:
    def reducer_override(pickler: Any, obj: Any) -> Any:
        if (
            isinstance(obj, (type, types.FunctionType))
            and obj.__module__ in MAIN_NAMES
            and isinstance(sys.modules["__main__"], Main)
            and _spawns(process)
        ):
            raise TypeError(
                f"{obj.__qualname__} of the script cannot be sent to a process that a task spawns, "
                "because neither it nor the worker runs the script: use "
                "multiprocessing.get_context('fork'), define it in a module that can be imported, "
                "or submit to hoplite_mp.current()"
            )
        return NotImplemented

    return reducer_override


def _spawns(process: Any) -> bool:
    """Whether the object is being pickled for a child that was not forked. If it is unknown which
    pool or queue is pickling the object, returns whether this process has any such children."""
    context: Any = sys.modules["multiprocessing.context"]
    if context.get_spawning_popen() is not None:
        return True
    to_fork = _goes_to_fork()
    if to_fork is not None:
        return not to_fork
    process._cleanup()  # forgets children that have exited
    return any(map(_is_no_fork, list(process._children)))


def _is_no_fork(child: Any) -> bool:
    return getattr(child._popen, "method", "fork") != "fork"


def _goes_to_fork() -> bool | None:
    """Whether the pool or queue that is pickling in this thread belongs to forked children. None
    if neither is pickling in this thread."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        scope = frame.f_globals.get("__name__"), frame.f_code.co_name
        if scope == ("multiprocessing.pool", "_handle_tasks"):
            return not any(map(_is_no_fork, list(frame.f_locals.get("pool", ()))))
        if scope == ("multiprocessing.queues", "_feed"):
            # Python sets this attribute so that a queue for forks is not sent to other children.
            found: bool | None = getattr(frame.f_locals.get("queue_sem"), "_is_fork_ctx", None)
            return found
        frame = frame.f_back
    return None
