"""`hoplite-mp dump`: all waits in a running cluster, with their causes, as text or JSON.

Each node reports its own waits. Together, the reports also show which nodes have not finished their
part of a collective.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp._api.cluster import Cluster
from hoplite_mp._api.nodes import node_id
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._protocol.local import Dump, DumpRead
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


__all__ = ["collect", "dump", "lines"]

_FRAME = re.compile(r'\s*File "(.+)", line (\d+) in ')  # as written by faulthandler


def connect(arguments: argparse.Namespace) -> Cluster:
    """Joins the cluster at `address` without workers. Raises HopliteError or ValueError if the
    cluster cannot be reached."""
    return Cluster(
        workers=0,
        address=arguments.address,
        token=arguments.token_file,
        tls=False if arguments.no_tls else None,
    )


def own_node(cluster: Cluster) -> int | None:
    """The number of the node that this process has started for the command; None if this process
    is attached to the host's node."""
    host = cluster._host
    if host is None or host.attached:
        return None
    return cluster._runtime.tasks.node_number


def dump(arguments: argparse.Namespace) -> int:
    """Prints all waits of the cluster. Returns the exit code."""
    try:
        with connect(arguments) as cluster:
            own = own_node(cluster)
            found = collect(cluster, stacks=arguments.stacks)
    except (HopliteError, ValueError) as error:  # even if the cluster shuts down meanwhile
        print(f"hoplite-mp: {error}", file=sys.stderr)
        return 1
    found["nodes"] = [report for report in found["nodes"] if report["node"] != own]
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(lines(found)))
    return 0


def collect(cluster: Cluster, stacks: bool = False) -> dict[str, Any]:
    """Returns {"nodes": the nodes' reports, "silent": the nodes that did not answer in time}. Adds
    "not_reported" to each collective: the nodes that have not reported the end of their part."""
    channel = cluster._runtime.channel
    sizes, silent = channel.call(Dump(stacks)).value
    nodes = []
    for node, nbytes in sizes:
        data = b""
        while len(data) < nbytes:
            piece = channel.call(DumpRead(node, len(data))).value
            if not piece:
                break
            data += piece
        nodes.append(msgspec.msgpack.decode(data))
    reported = {
        (part["operation"], part["epoch"], report["node"])
        for report in nodes
        for part in report["parts"]["first"]
        if part["reported"]
    }
    # A report lists only the first parts on a node, so the other parts are unknown.
    unknown = {
        report["node"]
        for report in nodes
        if report["parts"]["count"] > len(report["parts"]["first"])
    }
    unknown.update(silent)
    for report in nodes:
        for operation in report["collectives"]["first"]:
            key = operation["operation"], operation["epoch"]
            # A node that does not list its part has not reported it, either. (A plan for a single
            # node has no parts, and ends with that node's report.)
            operation["not_reported"] = [
                node_id(node)
                for node in operation["waits_for"]
                if (*key, node) not in reported and node not in unknown
            ]
    return {"nodes": nodes, "silent": [node_id(node) for node in silent]}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The reports as text, with one line for each wait."""
    for report in found["nodes"]:
        yield f"{node_id(report['node'])} ({report['host']})"
        is_empty = True
        for kind, line in _KINDS.items():
            section = report.get(kind)
            for item in section["first"] if section else ():
                for text in line(item).split("\n"):
                    yield f"  {text}"
                is_empty = False
            more = section["count"] - len(section["first"]) if section else 0
            if more > 0:
                yield f"  and {more} more ({kind})"
        if is_empty:
            yield "  no waits"
    for node in found["silent"]:
        yield f"{node} does not answer"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:.1f} s"


def _needs(item: dict[str, Any]) -> str:
    """The listed missing objects, and the number of missing objects that are not listed."""
    named = []
    for need in item["needs"]:
        at = f"[{need['index']}] " if "index" in need else ""
        named.append(f"{at}{need['id']} ({need['where'] or 'ready'})")
    more = item["missing"] - len(named)
    return ", ".join([*named, f"{more} more"] if more > 0 else named)


def _waiting(item: dict[str, Any]) -> str:
    task = f"task {item['name']}() {item['id']} waits{_for(item['seconds'])}"
    if not item["missing"]:
        return f"{task} to be sent by {item['by']}; its arguments are ready"
    return f"{task} for {_needs(item)}; submitted by {item['by']}"


def _queued(item: dict[str, Any]) -> str:
    origin = f", from {item['from']}" if item["from"] else ""
    workers = f"pool {item['pool']}, {item['workers']} workers here{origin}"
    if "pause" in item:
        task = f"task {item['name']}() {item['id']}"
        return f"{task} has failed, and is retried in {item['pause']:.1f} s ({workers})"
    return f"task {item['name']}() {item['id']} is queued{_for(item['seconds'])} ({workers})"


def _running(item: dict[str, Any]) -> str:
    depth = item["inside"]
    inside = f", nested in {depth} task{'s' * (depth != 1)}" if depth else ""
    task = f"task {item['name']}() {item['id']}"
    return f"{task} runs{_for(item['seconds'])} on {item['on']}{inside}"


def _sent(item: dict[str, Any]) -> str:
    return f"task {item['name']}() {item['id']} was sent to {item['to']} and is not done"


def _transfer(item: dict[str, Any]) -> str:
    what = f"object {item['object']}" if item["object"] else f"a part of {item['kind'] or 'a call'}"
    if item["operation"] is not None:
        what += f" (operation {item['operation']})"
    received = f"{format_bytes(item['come'])} of {format_bytes(item['bytes'])}"
    if item["kind"] == "not planned yet":
        received = "no plan yet"
    return f"{what} is in transit from {item['from']}{_for(item['seconds'])}: {received}"


def _collective(item: dict[str, Any]) -> str:
    what = f"{item['kind']} {item['op']}".strip()
    ready = item["sources"] - item["missing"]
    text = f"{what} (operation {item['operation']}) by {item['by']} is open{_for(item['seconds'])}"
    text += f": {ready} of {item['sources']} sources ready, {item['num']} needed"
    if item["missing"]:
        text += f"; missing: {_needs(item)}"
    if item["planned"] is not None:
        text += f"; plan {item['epoch']} runs{_for(item['planned'])}"
        if item["waits_for_space"]:
            text += ", and waits for space in the store"
        if item["not_reported"]:
            text += f"; not reported: {', '.join(item['not_reported'])}"
    return text


def _part(item: dict[str, Any]) -> str:
    state = f"{item['missing']} pieces are missing" if item["missing"] else "complete"
    state = state if item["begun"] else "waiting for space or sources"
    state = "reported" if item["reported"] else state
    plan = f"operation {item['operation']}, plan {item['epoch']}"
    return f"part of {plan}, open{_for(item['seconds'])}: {state}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _group(item: dict[str, Any]) -> str:
    joined = [
        f"{member['rank']} (" + (f"pid {member['pid']} at " if member["pid"] else "at ")
        + f"{node_id(member['node'])})"
        for member in item["joined"]
    ]  # fmt: skip
    text = f"group {item['name']!r} of size {item['size']}: joined: {', '.join(joined) or 'none'}"
    if not item["formed"]:
        present = {member["rank"] for member in item["joined"]}
        absent = [rank for rank in range(item["size"]) if rank not in present]
        return f"{text}; waiting for {_ranks(absent)}"
    for box in item["unread"]:
        text += f"; {box['messages']} unread for rank {box['rank']}"
    text += f"; call {item['call']}"
    if item["kind"]:
        text += f" ({item['kind']})"
    if item["made"]:
        text += f" made by {_ranks(item['made'])}"
        text += f", waiting for {_ranks(item['awaited'])}" if item["awaited"] else ""
    else:
        text += " not made by any rank on this host"
    if item["transferring"]:
        nodes = ", ".join(node_id(node) for node in item["transferring"])
        text += f"; transfers are incomplete on {nodes}"
    elif item["leader"] and not item["awaited"]:
        text += f"; {item['leader']} decides"
    return text


def _process(item: dict[str, Any]) -> str:
    inside = f" in {item['task']}()" if item["task"] else ""
    if not item["id"]:
        return f"{item['process']} waits{inside} for a Group or for another thread's wait"
    more = f" and {item['more']} more" if item["more"] else ""
    where = f" ({item['where']})" if item["where"] else ""
    return f"{item['process']} waits{inside}{_for(item['seconds'])} for {item['id']}{where}{more}"


def _stack(item: dict[str, Any]) -> str:
    if item["idle"]:  # all idle workers have the same stack
        return f"worker {item['worker']} (pid {item['pid']}) is idle"
    text = "\n".join(map(_with_source, item["text"].rstrip().split("\n")))
    return f"worker {item['worker']} (pid {item['pid']}) runs\n{text}"


def _with_source(line: str) -> str:
    """A line of a stack, with the source line of its frame if this host has the file."""
    found = _FRAME.match(line)
    text = linecache.getline(found[1], int(found[2])).strip() if found else ""
    return f"  {line}\n      {text}" if text else f"  {line}"


def _actor(item: dict[str, Any]) -> str:
    named = f"actor {item['name']!r} ({item['class']})" if item["name"] else f"a {item['class']}"
    pids = f" (pid {', '.join(map(str, item['pids']))})" if item["pids"] else ""
    calls = f"{item['waiting']} calls waiting, {item['running']} running, {item['done']} done"
    restarts = f"{item['restarts']} restarts, {item['restarts_left']} left"
    return f"{named} {item['identity']} {item['state']}{pids}: {calls}; {restarts}"


def _actor_calls(item: dict[str, Any]) -> str:
    where = f"on {item['at']}" if item["at"] else "whose host is lost, to be restarted"
    return f"{item['waiting']} calls wait here for actor {item['identity']} {where}"


_KINDS = {
    "running": _running,
    "queued": _queued,
    "waiting": _waiting,
    "sent": _sent,
    "transfers": _transfer,
    "collectives": _collective,
    "parts": _part,
    "groups": _group,
    "actors": _actor,
    "actor calls": _actor_calls,
    "processes": _process,
    "stacks": _stack,
}
