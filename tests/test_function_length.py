"""Functions of Python and C have at most 70 lines; their docstrings do not count."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = 70
# Straight sequences that would be harder to read in parts. At most five.
EXCEPTIONS = {
    # Each descriptor is made, passed on and closed.
    "hoplite_mp/_client/launch.py HostProcesses.__init__",
    # A task's way to the queue, in 2 µs.
    "hoplite_mp/_client/submitter.py Submitter.submit",
    # All that a task changes is put back at its end.
    "hoplite_mp/_worker/task_loop.py Worker.run",
}
C_FUNCTION = re.compile(r"^[A-Za-z_][^;{}]*\([^;{}]*\)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
CYTHON_FUNCTION = re.compile(r"^( *)(?:cdef|cpdef|def) (?!class|struct|extern|enum)[^=]*\(")


def python_functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    """The qualified name and the lines of each function below a node, without its docstring."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}{one.name}"
            if not isinstance(one, ast.ClassDef):
                first = one.body[0]
                has_docstring = ast.get_docstring(one, clean=False) is not None
                docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
                yield name, (one.end_lineno or 0) - one.lineno + 1 - docstring
            yield from python_functions(one, f"{name}.")
        else:
            yield from python_functions(one, inside)


def c_functions(text: str) -> Iterator[tuple[str, int]]:
    """The head and the lines of each function of a C file."""
    for found in C_FUNCTION.finditer(text):
        yield found[0].split("{")[0].strip(), found[0].count("\n") + 1


def cython_functions(text: str) -> Iterator[tuple[str, int]]:
    """The head and the lines of each function of a Cython file, with its docstring."""
    lines = text.splitlines()
    for begin, line in enumerate(lines):
        if head := CYTHON_FUNCTION.match(line):
            end = begin
            for number in range(begin + 1, len(lines)):
                indented = len(lines[number]) - len(lines[number].lstrip())
                if lines[number].strip() and indented <= len(head[1]) and lines[number][0] != ")":
                    break
                end = number if lines[number].strip() else end
            yield line.strip(), end - begin + 1


def long_functions() -> set[str]:
    """Those with more lines than allowed."""
    found: set[str] = set()
    for folder in ("hoplite_mp", "benchmarks", "docs", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, lines in python_functions(ast.parse(path.read_text())):
                if lines > LINES_MAX:
                    found.add(f"{path.relative_to(ROOT)} {name}")
    for path in (ROOT / "cext").iterdir():
        read = c_functions if path.suffix in (".c", ".h") else cython_functions
        for name, lines in read(path.read_text()):
            if lines > LINES_MAX:
                found.add(f"{path.relative_to(ROOT)} {name}")
    return found


def test_functions_are_short_enough() -> None:
    assert long_functions() == EXCEPTIONS
    assert len(EXCEPTIONS) <= 5


def test_long_functions_are_found_in_each_language() -> None:
    body = "    x = 1;\n" * LINES_MAX
    assert dict(c_functions(f"static int\nlong_one(int x) {{\n{body}}}\n")) == {
        "static int\nlong_one(int x)": LINES_MAX + 3
    }
    (cython,) = cython_functions(f"cdef int long_one(int x):\n{body}\n\nx = 1\n")
    assert cython[1] == LINES_MAX + 1
    tree = ast.parse(f'class A:\n  def f():\n    """a\n    b"""\n{body}')
    assert dict(python_functions(tree)) == {"A.f": LINES_MAX + 1}
