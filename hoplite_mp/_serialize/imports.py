"""Which modules readers can import, and which modules only this program has imported.

Workers have the `sys.path` that this program had when it started them, and the finders that `site`
installs. Readers can import a module if these find the same file for its name. They cannot import a
module that the program has made in another way: from a file at another place, in memory, with a
finder of its own.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import re
import site
import sys
import types
import weakref
from typing import Any

_OWN_FINDERS: tuple[Any, ...] = (
    importlib.machinery.BuiltinImporter,
    importlib.machinery.FrozenImporter,
    importlib.machinery.PathFinder,
)
_BUILT_IN = frozenset({"built-in", "frozen"})
_CYTHON = "_cython_", "cython_runtime"  # modules that compiled code makes, without a file
Path = list[str] | None  # None: `sys.path`
Answer = tuple[weakref.ref[types.ModuleType], Path, bool, tuple[Any, ...] | None]
_path: Path = None  # the path of the workers that this process has started last
# Name -> the module that was looked at, the path that was searched, the answer, and of a module
# without a `__spec__`, which the program may still be filling, what the answer depends on.
_answers: dict[str, Answer] = {}
_site_finders: dict[str, bool] = {}  # name of a finder's module -> does `site` install it?


def set_readers_path(path: list[str]) -> None:
    """From now on, readers search this path for modules."""
    global _path
    _path = path


def is_found_by_readers(name: str) -> bool:
    """Will a reader that imports this name, which is in sys.modules, get the same module?"""
    module: Any = sys.modules[name]
    known = _answers.get(name)
    path = _path
    if known is not None and known[0]() is module and known[1] is path:
        _, _, found, filled = known
        if filled is None or filled == _filled(module):
            return found
    if not isinstance(module, types.ModuleType):
        return True  # an object that stands in for its module
    unfinished = getattr(module, "__spec__", None) is None
    filled = _filled(module) if unfinished else None
    found = _is_found(name, module)
    _answers[name] = weakref.ref(module), path, found, filled
    return found


def _filled(module: Any) -> tuple[Any, ...]:
    names = vars(module)
    return names.get("__name__"), names.get("__spec__"), names.get("__file__")


def _is_found(name: str, module: types.ModuleType) -> bool:
    real = module.__name__
    if real != name and sys.modules.get(real) is module:
        return is_found_by_readers(real)  # the name is another one for the same module
    own = getattr(module, "__spec__", None)
    if getattr(own, "origin", None) in _BUILT_IN:
        return True  # of Python, perhaps by another name: `collections.abc` is `_collections_abc`
    files = {getattr(own, "origin", None), getattr(module, "__file__", None)} - {None}
    if any(str(file).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)) for file in files):
        return True  # compiled code cannot travel by value
    try:
        spec = _find(name)
    except Exception:  # a parent's `__path__` may be anything
        return True
    head = name.rpartition(".")[0]
    if head in sys.modules and not is_found_by_readers(head):
        return False
    if spec is None:  # a module without a file comes with the package that has made it
        return not files and (head in sys.modules or name.startswith(_CYTHON))
    if spec.origin is None or spec.origin in _BUILT_IN:
        return True  # a package without a file, or a module of Python
    if not files:  # a module in memory has the name of a file, or has replaced that file's module
        return own is not None or type(module) is not types.ModuleType
    return any(_same_file(spec.origin, str(file)) for file in files)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    head = name.rpartition(".")[0]
    path: Any = _path
    if head:
        path = getattr(sys.modules.get(head), "__path__", None)
        if not isinstance(path, list):  # that of a package without a file grows with `sys.path`
            parent = _find(head)
            path = None if parent is None else parent.submodule_search_locations
            if path is None:
                return None
    for finder in (*_OWN_FINDERS, *filter(_is_from_site, sys.meta_path)):
        where = path if head or finder is importlib.machinery.PathFinder else None
        found: importlib.machinery.ModuleSpec | None = finder.find_spec(name, where)
        if found is not None:
            return found
    return None


def _same_file(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _is_from_site(finder: Any) -> bool:
    """Does `site` install this finder in each process, as for packages in development mode?"""
    name = getattr(finder, "__module__", None)
    if type(name) is not str or finder in _OWN_FINDERS:
        return False
    known = _site_finders.get(name)
    if known is None:
        named = re.compile(rf"^import\s.*\b{re.escape(name)}\b", re.MULTILINE)
        customs = {"sitecustomize", "usercustomize"}
        known = name in customs or any(map(named.search, _path_files()))
        _site_finders[name] = known
    return known


def _path_files() -> list[str]:
    """The texts of the .pth files that `site` has run."""
    texts = []
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                if entry.endswith(".pth"):
                    with open(os.path.join(folder, entry), errors="replace") as file:
                        texts.append(file.read())
    return texts
