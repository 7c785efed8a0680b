"""`make mutation-sample`: small changes at places that chance chooses, and whether a test fails.

The mistakes of `shipped.py` are those that somebody has thought of. Here cosmic-ray changes
operators, numbers and conditions at 150 places of the planner and 150 of the node, and the tests of
that part have to fail. What they do not notice is either worth a test, or harmless: then
`survivors.md` says why.

    python -m tests.mutants.sample [planner] [node] [--count N] [--again | --survivors | --show]

cosmic-ray writes its changes into files, so everything happens in a copy below `.mutants/`. The
session is kept there, so that this can be stopped and goes on where it was. A place is identified
by its function and the text of its line, not by its number: an edit elsewhere neither changes the
sample nor makes a result void. Exit code 0: each survivor is in `survivors.md`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from cosmic_ray.commands import init
from cosmic_ray.config import load_config
from cosmic_ray.modules import filter_paths, find_modules
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import TestOutcome, WorkItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cosmic_ray.config import ConfigDict
    from cosmic_ray.work_item import MutationSpec, WorkResult

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("tests/mutants")
FOLDER = ROOT / ".mutants" / "sample"
COPIED = ("hoplite_mp", "tests", "docs", "cext", "examples", "benchmarks", "pyproject.toml")
PARTS = ("planner", "node")
SEED = 1
COUNT = 150
# Whether == and `is` differ depends on which values the interpreter keeps once: not on our tests.
LEFT_OUT = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")


def copy_tree(to: Path) -> None:
    """With the compiled modules and the bytecode; times are kept, so that the bytecode is valid."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name)
        else:
            shutil.copy2(ROOT / name, to / name)


def never_executed(path: Path) -> set[tuple[int, int]]:
    """Lines and columns of annotations and of imports for type checking."""
    found: set[tuple[int, int]] = set()
    text = path.read_text()
    lines = text.splitlines()

    def add(node: ast.expr | ast.stmt) -> None:
        last = node.end_lineno or node.lineno
        for line in range(node.lineno, last + 1):
            begin = node.col_offset if line == node.lineno else 0
            end = (node.end_col_offset or 0) if line == last else len(lines[line - 1])
            found.update((line, column) for column in range(begin, end))

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            add(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            add(node.returns)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            add(node)
    return found


def draw(all_mutations: Iterable[MutationSpec], count: int) -> list[WorkItem]:
    """At most one for each place, because an operator has up to eleven others. Which ones: those
    whose names have the least hashes, so that most stay the same when the code changes."""
    mutations = sorted(
        all_mutations, key=lambda one: (str(one.module_path), one.operator_name, one.occurrence)
    )
    paths = {one.module_path for one in mutations}
    lines = {path: path.read_text().splitlines() for path in paths}
    unused = {path: never_executed(path) for path in paths}
    places: dict[tuple[Path, tuple[int, int]], tuple[str, MutationSpec]] = {}
    seen: Counter[str] = Counter()
    for one in mutations:
        path, (line, _) = one.module_path, one.start_pos
        if one.start_pos in unused[path] or one.operator_name.endswith(LEFT_OUT):
            continue
        text = lines[path][line - 1].strip()
        name = f"{SEED} {path} {one.definition_name} {one.operator_name} {text}"
        seen[name] += 1  # the same line, or twice in one line
        digest = hashlib.sha256(f"{name} {seen[name]}".encode()).hexdigest()[:10]
        place = (path, one.start_pos)
        places[place] = min(places.get(place, (digest, one)), (digest, one), key=lambda it: it[0])
    drawn = sorted(places.values(), key=lambda it: it[0])[:count]
    return [WorkItem.single(digest, one) for digest, one in drawn]


class Everything:
    """Takes what cosmic-ray finds: thousands of mutants, too many to be written into a session."""

    def clear(self) -> None:
        self.mutations: list[MutationSpec] = []

    def add_work_items(self, items: Iterable[WorkItem]) -> None:
        self.mutations += [item.mutations[0] for item in items]


def prepare(config: ConfigDict, session: Path, count: int, again: bool, survivors: bool) -> None:
    """Writes the sample into the session, with the results that still count."""
    modules = find_modules([Path(config["module-path"])])
    every = Everything()
    init(sorted(filter_paths(modules, config["excluded-modules"])), every, {})
    drawn = draw(every.mutations, count)
    with use_db(session) as db:
        kept = {} if again else dict(db.results)
        db.clear()
        db.add_work_items(drawn)
        for item in drawn:
            result = kept.get(item.job_id)
            if result is not None and not (survivors and not result.is_killed):
                db.set_result(item.job_id, result)


def argued() -> dict[str, str]:
    """The rows of the table of survivors: the verdict by the mutant's name."""
    rows = (
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in (ROOT / HERE / "survivors.md").read_text().splitlines()
        if line.startswith("| `")
    )
    return {row[0].strip("`"): row[-1] for row in rows}


def changes(result: WorkResult) -> Iterator[str]:
    for line in (result.diff or "").splitlines():
        if line.startswith(("+", "-", "@@")) and not line.startswith(("+++", "---")):
            yield f"    {line}"


def report(session: Path) -> int:
    """Returns how many have survived for which there is no reason."""
    known = argued()
    with use_db(session) as db:
        done, total = db.completed_work_items, db.num_work_items
    survived = [(item, result) for item, result in done if not result.is_killed]
    unable = [item for item, result in done if result.test_outcome == TestOutcome.INCOMPETENT]
    new = [one for one in survived if one[0].job_id not in known]
    for item, result in sorted(survived, key=lambda one: str(one[0].mutations[0].module_path)):
        mutation = item.mutations[0]
        reason = known.get(item.job_id, "NO REASON YET")
        where = f"{mutation.module_path}:{mutation.start_pos[0]} ({mutation.definition_name})"
        print(f"{item.job_id} {where}: {reason}", *changes(result), sep="\n")
    print(
        f"{total} in the sample, {len(done) - len(survived) - len(unable)} killed, "
        f"{len(survived)} survived ({len(survived) - len(new)} with a reason), "
        f"{len(unable)} could not be played, {total - len(done)} to do"
    )
    return len(new) + len(unable) + total - len(done)


def play(part: str, session: Path, arguments: argparse.Namespace) -> None:
    tree = FOLDER / part
    copy_tree(tree)
    os.chdir(tree)
    settings = HERE / f"{part}.toml"
    prepare(
        load_config(str(settings)), session, arguments.count, arguments.again, arguments.survivors
    )
    python = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        "CI": "1",  # hypothesis draws the same examples each time, and remembers none
    }
    for command in (["baseline", settings], ["exec", settings, session]):
        subprocess.run(
            ["nice", "-n", "19", python / "cosmic-ray", *command], env=environment, check=True
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="part", help=" or ".join(PARTS))
    parser.add_argument("--count", type=int, default=COUNT, help="of places, for each part")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="forget all that was found before")
    which.add_argument("--survivors", action="store_true", help="play again what has survived")
    which.add_argument("--show", action="store_true", help="play nothing, print what there is")
    arguments = parser.parse_args(argv)
    if not {*arguments.parts} <= {*PARTS}:
        parser.error(f"parts are {' and '.join(PARTS)}")
    left = 0
    for part in arguments.parts:
        session = FOLDER / f"{part}.sqlite"
        if not arguments.show:
            play(part, session, arguments)
        elif not session.exists():
            parser.error(f"nothing of {part} was played yet")
        print(f"{part}:")
        left += report(session)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
