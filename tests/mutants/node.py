"""Mistakes in tasks on other hosts, members, and the way to the manager."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "delegation-requeued-in-silence",
        "hoplite_mp/_node/tasks/outbound_tasks.py",
        ("        else:\n            self.events.post(oid)\n        return True"),
        "        return True",
        (
            "A task with retries whose host is lost runs again on another worker; here it "
            "is queued, but no worker hears of it, and who waits for the result hangs."
        ),
    ),
    Mutant(
        "far-workers-lost-while-they-begin-again",
        "hoplite_mp/_node/tasks/remote_workers.py",
        "            short.asked[host_id] -= 1\n",
        "            short.asked[host_id] -= answer is not None\n",
        (
            "A peer of spmd whose host is lost begins again on another host while the others run; "
            "here it waits for one of them to end if that host is lost as well, and they for it."
        ),
    ),
    Mutant(
        "delegation-keeps-the-runner-waiting",
        "hoplite_mp/_node/tasks/outbound_tasks.py",
        (
            "        if message.refs:\n"
            "            self.send(peer, Release(message.task, 0))\n"
            "        encoded"
        ),
        "        encoded",
        (
            "A runner lets go of a result with refs inside as soon as the submitter's host "
            "holds them; here it never hears so, and keeps the result and all that it "
            "names for ever."
        ),
    ),
    Mutant(
        "guests-keep-results-for-a-dead-host",
        "hoplite_mp/_node/tasks/inbound_tasks.py",
        ("            if inbound_task.oid:\n                self._forget(inbound_task)"),
        (
            "            if inbound_task.oid and not inbound_task.ended:\n"
            "                self._forget(inbound_task)"
        ),
        (
            "Results that a host keeps for another one go when that one dies; here results "
            "that were complete at that moment stay in memory for ever."
        ),
    ),
    Mutant(
        "guests-forget-results-with-refs",
        "hoplite_mp/_node/tasks/inbound_tasks.py",
        ('kept = message.refs or (message.outcome == "ready" and message.payload is None)'),
        'kept = message.outcome == "ready" and message.payload is None',
        (
            "A task on another host may return a ref to what it has put there; here the "
            "runner lets go of the result before the submitter's host holds the inner "
            "object, which is lost on the way."
        ),
    ),
    Mutant(
        "sweeper-forgets-refs-of-a-dead-worker",
        "hoplite_mp/_node/tasks/sweeper.py",
        'elif not adopted and header["claimant"] == slot and not header["taken"]:',
        'elif not adopted and header["claimant"] == slot and header["taken"]:',
        (
            "A result with refs outlives the worker that made it; here, if the worker dies "
            "before the submitter has taken the refs over, nobody holds the inner objects "
            "and they are lost."
        ),
    ),
    Mutant(
        "sweeper-does-not-retry-guests",
        "hoplite_mp/_node/tasks/sweeper.py",
        'if not (wanted or self.events.is_inbound(oid)) or not header["retries_left"]:',
        'if not wanted or not header["retries_left"]:',
        (
            "A task with retries runs again when its worker dies, wherever it runs; here "
            "one that another host has sent fails with WorkerLostError at the first death."
        ),
    ),
    Mutant(
        "workers-do-not-repeat-hints",
        "hoplite_mp/_node/tasks/workers.py",
        ("        self.start_missing(pool)\n        self.post_queued(pool.number)"),
        "        self.start_missing(pool)",
        (
            "Queued tasks run although a worker has died; here tasks whose announcements "
            "the dead worker had taken, and the task that is to be tried again, are not "
            "announced anew and hang."
        ),
    ),
    Mutant(
        "draining-lets-go-too-early",
        "hoplite_mp/_node/tasks/draining.py",
        "if sent or host_id not in by_host_id or by_host_id[host_id].node in needed:",
        "if sent or host_id not in by_host_id:",
        (
            "remove_node loses no result that another host could have fetched; here the "
            "leaving node is told that it may go while bytes that it alone has are still "
            "to be fetched."
        ),
    ),
    Mutant(
        "peers-ended-connection-is-ignored",
        "hoplite_mp/_node/peers/peers.py",
        (
            '            _log.info("the connection to node h%d ended: %s", '
            "peer.member.node, reason)\n"
            "            self.lose_member(peer.member)"
        ),
        ('            _log.info("the connection to node h%d ended: %s", peer.member.node, reason)'),
        (
            "If the connection between two living hosts breaks, what was lost with it is "
            "dealt with like a death; here the messages that were under way are missing "
            "without a word, and who waits for them hangs."
        ),
    ),
    Mutant(
        "peers-let-in-one-connection",
        "hoplite_mp/_node/peers/peers.py",
        "for admission, attach in self.unknown.pop(host_id, ()):",
        "for admission, attach in self.unknown.pop(host_id, [])[:1]:",
        (
            "A host that has just joined may call the others before these have heard of "
            "it; here only its first connection is served, and a transfer over the second "
            "one hangs."
        ),
    ),
    Mutant(
        "missing-the-dead-stay-in-doubt",
        "hoplite_mp/_node/peers/peers.py",
        "            self.members.pop(number, None)",
        "            self.members.get(number)",
        (
            "When the manager confirms a death, lost results are made again; here a host "
            "that noticed the death by itself stays in doubt about it for ever, and "
            "replaces no lost result any more."
        ),
    ),
    Mutant(
        "links-unreachable-parent-is-not-reported",
        "hoplite_mp/_node/peers/links.py",
        ("            if why_not:\n                self.wanting[cell].failed(cell, why_not)"),
        ("            if why_not:\n                continue"),
        (
            "A copy comes from another host if the first choice cannot be reached; here "
            "the failed connection is reported to nobody, no other parent is asked for, "
            "and the reader hangs."
        ),
    ),
    Mutant(
        "management-failed-fetch-is-not-repeated",
        "hoplite_mp/_node/manager_link/connection.py",
        ("ONCE = (\n    FetchFailed,\n"),
        "ONCE = (\n",
        (
            "A host that reports that its parent fails it gets another one also if the "
            "manager dies before reading that; here the report is not said to the next "
            "manager, and the reader hangs."
        ),
    ),
    Mutant(
        "management-forgets-ends",
        "hoplite_mp/_node/manager_link/connection.py",
        "            self._ends.append(message)",
        "            pass",
        (
            "A collective that one host has been told is committed is committed on all, "
            "whatever happens to the manager; here the next manager does not hear of the "
            "commit, other hosts drop their part, and the result is lost."
        ),
    ),
    Mutant(
        "failover-asks-no-former-manager",
        "hoplite_mp/_node/manager_link/failover.py",
        "self._voted_at, self._is_unled = None, True",
        "self._voted_at = None",
        (
            "A host that has voted in vain hears from its former manager that the others go "
            "on without it; here it asks nobody, and its programs wait for a standby that "
            "never wins."
        ),
    ),
    Mutant(
        "membership-keeps-the-dead",
        "hoplite_mp/_node/manager_link/membership.py",
        "member = self.members.pop(number, None)",
        "member = self.members.get(number)",
        (
            "nodes shows the hosts that are there; here hosts that are gone stay in the "
            "list for ever, and their end is dealt with twice."
        ),
    ),
    Mutant(
        "lan-restart-does-not-report-holdings",
        "hoplite_mp/_node/runtime/cluster_node.py",
        (
            "        for number in gone:  # the manager may be waiting for this report\n"
            "            self.recovery.report(number)\n"
        ),
        "",
        (
            "Objects of a host that died together with the manager get new owners; here the "
            "survivors do not report what they have, the manager waits for ever, and "
            "readers of these objects hang."
        ),
    ),
    Mutant(
        "lan-drain-waits-for-the-dead",
        "hoplite_mp/_node/runtime/peer_loss.py",
        "        receivers[name](member)\n",
        '        if name != "draining":\n            receivers[name](member)\n',
        (
            "remove_node ends when all living hosts have what they need; here the leaving "
            "node waits also for a host that has died meanwhile, and never leaves."
        ),
    ),
    Mutant(
        "far-actor-calls-wait-after-its-end",
        "hoplite_mp/_node/runtime/node_events.py",
        (
            "        pool = self.components.workers.tasks.pool_of(oid)\n"
            "        self.remote_actors.fail_calls(pool)"
        ),
        "        ",
        (
            "Calls that may be tried again fail if their actor has ended meanwhile; here they are "
            "queued for it for ever."
        ),
    ),
    Mutant(
        "actors-grant-an-ended-one",
        "hoplite_mp/_node/actors/actors.py",
        'if hold is None or self.client.state(hold.oid) == STATE["FAILED"]:',
        "if hold is None:",
        (
            "Who asks for an actor by its name gets one that lives; here the header of one "
            "that has just ended on another host."
        ),
    ),
    Mutant(
        "peer-loss-results-go-before-they-are-held",
        "hoplite_mp/_node/runtime/peer_loss.py",
        '    "recovery",\n    "resources",\n    "outbound_tasks",\n    "inbound_tasks",\n',
        '    "resources",\n    "outbound_tasks",\n    "inbound_tasks",\n    "recovery",\n',
        (
            "The result of a task that a host has run for another one is kept when that one dies, "
            "and read from there; here it is released before it is held for the next owner, and is "
            "lost."
        ),
    ),
    Mutant(
        "peer-loss-questions-end-first",
        "hoplite_mp/_node/runtime/peer_loss.py",
        '    "remote_objects",\n    "questions",\n)',
        '    "questions",\n    "remote_objects",\n)',
        (
            "What is asked about an object is answered from the hosts that live; here a question "
            "to a host that has died ends while that host still counts as one that has the object."
        ),
    ),
)
