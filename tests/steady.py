"""`make steady`: `make test` six times on one commit, three of them on a machine that is busy.

A suite that is green once may be so by luck, or because nobody else was at work. The runs are
recorded for each commit below `.steady/`, each as soon as it has ended, so that this can be stopped
(Ctrl-C) and goes on where it was; a run that was stopped counts for nothing. The tree must be
clean, before and after each run: what is tested is the commit.

    python tests/steady.py [--command "make test"] [--again] [--show]

Busy: `stress-ng --cpu 4`, or as many processes of our own that compute where it is not installed,
and beside it a program that starts one joblib pool after the other. Exit code 0: six times green.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE, BUSY = "alone", "busy"
PLAN = (BUSY, BUSY, BUSY, ALONE, ALONE, ALONE)  # first those that are likelier to fail
SPINNERS = 4
SPIN = "while True: pass"
# One pool after the other, arguments large enough for files below /dev/shm, and their semaphores.
# It ends between two pools: killed while the system makes a semaphore it would leave that behind.
JOBLIB = """
import signal
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
import joblib, numpy as np
data = np.ones(1 << 20)
while not ended:
    joblib.Parallel(n_jobs=2, max_nbytes="1K")(joblib.delayed(np.sum)(data) for _ in range(20))
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)
"""
SUMMARY = re.compile(r"\b(\d+) (passed|failed|skipped|errors?|deselected|xfailed)\b")
BAD = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
HUNG = 124  # as the code of a run that did not end: that of `timeout`
END_S = 5.0  # for what runs beside, to end when it is asked to
RUN_S_MAX = 7200.0  # of one run; none has needed half an hour, also beside others


class Stopped(Exception):
    """There is nothing that can be tested, and why."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", default="make test", help="default: %(default)s")
    parser.add_argument("--again", action="store_true", help="forget this commit's runs first")
    parser.add_argument(
        "--longest",
        type=float,
        default=RUN_S_MAX,
        metavar="S",
        help="for one run",
    )
    parser.add_argument("--show", action="store_true", help="only the table")
    arguments = parser.parse_args(argv)
    try:
        root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        commit = clean_commit(root)
        path = root / ".steady" / f"{commit}.jsonl"
        if arguments.again:
            path.unlink(missing_ok=True)
        done = read(path)
        if not arguments.show:
            for conditions in left(done):
                print(f"run {len(done) + 1}: {conditions}", flush=True)
                log = path.with_name(f"{commit[:12]}-{len(done) + 1}.log")
                path.parent.mkdir(exist_ok=True)
                found = run(arguments.command, conditions, root, log, arguments.longest)
                if clean_commit(root) != commit:
                    raise Stopped("another commit was checked out meanwhile; it does not count")
                with path.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                done.append(found)
    except Stopped as why:
        print(f"steady: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("steady: stopped; the runs that have ended are kept", file=sys.stderr)
        return 130
    print(f"commit {commit}\n{table(done)}")
    return 0 if is_steady(done) else 1


def left(done: list[dict[str, Any]]) -> list[str]:
    """The conditions of the runs that are still to be made."""
    conditions = list(PLAN)
    for one in done:
        if one["conditions"] in conditions:
            conditions.remove(one["conditions"])
    return conditions


def is_steady(done: list[dict[str, Any]]) -> bool:
    return not left(done) and all(one["code"] == 0 for one in done)


def clean_commit(root: Path) -> str:
    """What is checked out; Stopped if the files are not exactly that."""
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise Stopped(f"the tree is not clean; commit first:\n{changed}")
    return _git(root, "rev-parse", "HEAD")


def read(path: Path) -> list[dict[str, Any]]:
    """The runs that have ended; a last line without its end is of one that was killed."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def run(
    command: str, conditions: str, root: Path, log: Path, longest_s: float = RUN_S_MAX
) -> dict[str, Any]:
    """One run, whose whole output goes to `log`; one that hangs is ended, and has failed."""
    begun, wall = time.monotonic(), datetime.datetime.now().isoformat(timespec="seconds")
    with beside(conditions) as (load, dead), log.open("w") as file:
        process = subprocess.Popen(
            shlex.split(command),
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(longest_s)
        except subprocess.TimeoutExpired:
            _end(process)
            code = HUNG
        except BaseException:
            _end(process)
            raise
        if lost := dead():
            raise Stopped(f"{lost} has ended meanwhile: the machine was not busy")
    found = summary(log.read_text(errors="replace"))
    seconds = round(time.monotonic() - begun)
    return {"conditions": conditions, "load": load, "code": code, "seconds": seconds} | found | {
        "begun": wall, "log": str(log.relative_to(root)),
    }  # fmt: skip


def summary(text: str) -> dict[str, Any]:
    """The counts in pytest's last line, and the names of what failed. mypy counts errors too."""
    lines = [line for line in text.splitlines() if line.startswith("=") and SUMMARY.search(line)]
    counts = {word.rstrip("s") if word == "errors" else word: int(number)
              for number, word in SUMMARY.findall(lines[-1] if lines else "")}  # fmt: skip
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "names": sorted(set(BAD.findall(text))),
    }


@contextlib.contextmanager
def beside(conditions: str) -> Iterator[tuple[str, Any]]:
    """What makes the machine busy, in words, and a function that says which of it has ended."""
    commands: dict[str, list[str]] = {}
    if conditions == BUSY:
        if shutil.which("stress-ng"):
            commands[f"stress-ng --cpu {SPINNERS}"] = [
                "stress-ng", "--cpu", str(SPINNERS), "--quiet",
            ]  # fmt: skip
        else:
            print(
                "there is no stress-ng (apt install stress-ng): our own loops instead", flush=True
            )
            for i in range(SPINNERS):
                commands[f"loop {i + 1}"] = [sys.executable, "-c", SPIN]
        commands["joblib"] = [sys.executable, "-c", JOBLIB]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        # An interrupt between a start and the note of it would leave that process for ever. They
        # inherit the mask, and are ended by other signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for name, command in commands.items():
                processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        words = " + ".join(processes) or "nothing beside"
        yield (
            words,
            lambda: ", ".join(name for name, one in processes.items() if one.poll() is not None),
        )
    finally:
        for process in processes.values():
            _end(process)
            _sweep(process.pid)


def _sweep(pid: int) -> None:
    """joblib removes its folders and semaphores when its process exits, and this one is ended."""
    for pattern in (f"joblib_memmapping_folder_{pid}_*", f"sem.loky-{pid}-*"):
        for path in Path("/dev/shm").glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its children, which are a session of their own; of ours, and nobody else's."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def table(done: list[dict[str, Any]]) -> str:
    head = ("run", "conditions", "passed", "failed", "skipped", "seconds", "result")
    rows = [head] + [
        (
            str(number),
            f"{one['conditions']} ({one['load']})",
            *(str(one[key]) for key in ("passed", "failed", "skipped", "seconds")),
            "green" if one["code"] == 0 else f"code {one['code']}, {one['log']}",
        )
        for number, one in enumerate(done, 1)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for number, one in enumerate(done, 1):
        lines += [f"  run {number} failed: {name}" for name in one["names"]]
    missing = left(done)
    lines += [f"still to run: {', '.join(missing)}"] if missing else []
    return "\n".join(lines)


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True)
    if done.returncode:
        raise Stopped(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
