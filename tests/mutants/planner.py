"""Mistakes in the planner, and the loop around it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "copies-restart-does-not-tell-parents",
        "hoplite_mp/_planner/broadcast.py",
        "                sends += [(node, plan) for node in without]",
        "                continue",
        (
            "A copy goes on under a manager that was started again; here a parent that had "
            "not read the plan before is not told, never serves, and the receiver hangs."
        ),
    ),
    Mutant(
        "copies-wait-in-a-circle",
        "hoplite_mp/_planner/broadcast.py",
        "below = self._below(entry, receiver) if waited_for else set()",
        "below: set[int] = set()",
        (
            "A receiver that has lost its parent gets the object from another holder; here "
            "its new parent may be a host that itself waits for this receiver, and both "
            "hang."
        ),
    ),
    Mutant(
        "copies-refusal-strands-the-next",
        "hoplite_mp/_planner/broadcast.py",
        "return sends + self._replace(entry, hit, again, now) if hit else sends",
        "return sends",
        (
            "When the last whole copy is gone every receiver learns that; here those who "
            "pull from a refused receiver get neither a new parent nor a refusal, and hang."
        ),
    ),
    Mutant(
        "copies-failed-parent-is-chosen-again",
        "hoplite_mp/_planner/broadcast.py",
        "        entry.failed.add((node, message.parent))\n",
        "",
        (
            "A receiver that cannot reach a parent gets another one, or learns that there "
            "is none; here the same parent is named again and again, and the reader hangs."
        ),
    ),
    Mutant(
        "directory-never-forgives",
        "hoplite_mp/_planner/directory.py",
        (
            "            self.drop(entry)\n"
            "        elif not entry.receiving:\n"
            "            entry.failed.clear()"
        ),
        "            self.drop(entry)",
        (
            "A connection that broke once is tried again by a later fetch; here the pair "
            "of hosts counts as cut off as long as any copy of the object is known, and a "
            "get fails although the holder can be reached."
        ),
    ),
    Mutant(
        "reduce-restart-awaits-who-has-reported",
        "hoplite_mp/_planner/reduce.py",
        "op.unfinished = waits_for(plan) - fold.reported",
        "op.unfinished = waits_for(plan)",
        (
            "A collective that runs when the manager dies ends under the next one; here "
            "nodes that have said before that they are done are awaited once more, and the "
            "result never comes."
        ),
    ),
    Mutant(
        "reduce-restart-forgets-the-requester",
        "hoplite_mp/_planner/reduce.py",
        (
            "            if request is not None and isinstance(end, Forget):\n"
            "                end = None  # Forget was sent to a former participant; "
            "the operation continues\n"
        ),
        "",
        (
            "A host that left a collective on the way does not end it for others; here its "
            "old word ends the operation under the next manager without a result, and the "
            "caller hangs."
        ),
    ),
    Mutant(
        "reduce-replan-strands-old-parts",
        "hoplite_mp/_planner/reduce.py",
        (
            "        return sends + self._living(\n"
            "            [node for node in before if node not in told], "
            "Forget(request.operation)\n"
            "        )"
        ),
        "        return sends",
        (
            "A host that has no part in the new plan of an operation frees what it held "
            "for the old one; here it is not told, and its blocks stay leased for ever."
        ),
    ),
    Mutant(
        "reduce-dead-caller-strands-parts",
        "hoplite_mp/_planner/reduce.py",
        (
            "            self._forget(op)\n"
            "            sends += self._to_all(op, Forget(op.request.operation))"
        ),
        "            self._forget(op)",
        (
            "When the host that asked for a collective dies, the others free what they "
            "held for it; here they are not told, and their sources and blocks stay pinned "
            "for ever."
        ),
    ),
    Mutant(
        "reduce-reproducible-by-arrival",
        "hoplite_mp/_planner/reduce.py",
        'order, rule = op.folding_order(chosen), "fold" if request.reproducible else "any"',
        'order, rule = chosen, "fold" if request.reproducible else "any"',
        (
            "reproducible=True folds in the order of the refs, so the bits are the same in "
            "every run; here the order of arrival decides, and sums of floats differ "
            "between runs."
        ),
    ),
    Mutant(
        "reduce-deadline-takes-one",
        "hoplite_mp/_planner/operation.py",
        "return tuple(islice(found, self.request.num)) if enough else None",
        "return tuple(islice(found, self.need)) if enough else None",
        (
            "At the deadline everything that is ready goes in; here only the first source "
            "does, and the contributors that the user reads are too few."
        ),
    ),
    Mutant(
        "operation-counts-late-reports",
        "hoplite_mp/_planner/operation.py",
        (
            "def _note_complete(op: Operation, message: StripesComplete) -> ManagerToNode "
            "| None:\n"
            "    if message.epoch != op.epoch:\n"
            "        return None\n"
        ),
        ("def _note_complete(op: Operation, message: StripesComplete) -> ManagerToNode | None:\n"),
        (
            "A result is committed when every part of the latest plan is there; here a "
            "late report about an earlier plan counts for the new one, and a result is "
            "sealed whose bytes have not come."
        ),
    ),
    Mutant(
        "operation-source-dies-with-any-holder",
        "hoplite_mp/_planner/operation.py",
        ("        source.holders.pop(node, None)\n        if not source.holders:"),
        "        if source.holders.pop(node, 0) is None:",
        (
            "A source that another host holds as well stays in a reduction when one holder "
            "dies; here it counts as failed, and the result lacks it, or the operation "
            "fails, without need."
        ),
    ),
    Mutant(
        "operation-tree-loses-an-inner-node",
        "hoplite_mp/_planner/operation.py",
        'if provides or (plan.shape != "stripes" and node in waits_for(plan)):',
        "if provides:",
        (
            "Destinations get the result although another destination dies; here the loss "
            "of a host that only passes the result on in a tree causes no new plan, and "
            "the hosts below it hang."
        ),
    ),
    Mutant(
        "repair-leaves-a-gap",
        "hoplite_mp/_planner/repair.py",
        (
            "            reached += width\n"
            "            end = stripe.begin_share + length * reached // total\n"
        ),
        (
            "            end = stripe.begin_share + length * reached // total\n"
            "            reached += width\n"
        ),
        (
            "After an owner's death its stripe is divided completely among the others; "
            "here the last part of it belongs to nobody, and that part of the result is "
            "never written."
        ),
    ),
    Mutant(
        "group-late-death-hits-the-next-process",
        "hoplite_mp/_planner/groups.py",
        "if member.identity[:2] == (node, client) and member.identity[2] <= generation",
        "if member.identity[:2] == (node, client)",
        (
            "A late word about a dead process never touches the process that has taken its "
            "slot; here such a word, said again to a new manager, throws a living member "
            "out of its Group."
        ),
    ),
    Mutant(
        "group-awaits-a-dead-former-host",
        "hoplite_mp/_planner/groups.py",
        (
            "            group.lose([r for r, m in group.members.items() if "
            "m.identity.node == node])\n"
            "            # Even without lost members, because `former` has changed.\n"
            "            sends += self._settle(group)"
        ),
        (
            "            sends += self._remove(\n"
            "                group, [r for r, m in group.members.items() if "
            "m.identity.node == node]\n"
            "            )"
        ),
        (
            "A host that dies after its last member has left a Group is awaited by nobody; "
            "here the members are not told that it is gone, the leader waits for its word, "
            "and the next call hangs."
        ),
    ),
    Mutant(
        "group-joining-stay-joining",
        "hoplite_mp/_planner/groups.py",
        (
            "        if not group.mask(MemberStanding.ALIVE):\n"
            "            for member in group.members.values():\n"
            "                member.standing = MemberStanding.ALIVE\n"
        ),
        "",
        (
            "Members that are joining go on by themselves if all others die; here nobody "
            "is left who could admit them, and they hang."
        ),
    ),
    Mutant(
        "group-restart-believes-the-oldest",
        "hoplite_mp/_planner/group_recovery.py",
        "if known is None or known.version < version.version:",
        "if known is None or known.version > version.version:",
        (
            "A Group goes on with its members when the manager is started again; here the "
            "oldest list that any host knows is taken, and a member that came after it is "
            "out although it lives."
        ),
    ),
    Mutant(
        "group-restart-overlooks-the-unheard",
        "hoplite_mp/_planner/group_recovery.py",
        "        return [(node, shown) for node in sorted(unreached)]",
        "        return []",
        (
            "A member that died before its host heard that it was one is gone for all; here "
            "its host does not know of the Group, never says that nothing more comes from it, "
            "and receivers hang."
        ),
    ),
    Mutant(
        "group-members-one-founder-has-come",
        "hoplite_mp/_planner/group_members.py",
        "self.come |= 1 << rank",
        "self.come = 1 << rank",
        (
            "A Group that comes out of another one is whole when each founder has joined "
            "or died; here founders that have come are forgotten, so if one founder has "
            "died before joining the others wait in vain."
        ),
    ),
    Mutant(
        "restoring-own-node-may-be-late",
        "hoplite_mp/_planner/manager_recovery.py",
        "wanted = (self._members.keys() | {self._own})",
        "wanted = self._members.keys()",
        (
            "A standby that a user promotes leads its own host, even if the others have heard that "
            "this host was given up; here it may begin with their reports alone, takes its own "
            "host for lost, and the cluster ends."
        ),
    ),
    Mutant(
        "restoring-takes-old-plans-for-new",
        "hoplite_mp/_planner/manager_recovery.py",
        ("            fold.older.add(message.node)\n            return\n"),
        "            fold.older.add(message.node)\n",
        (
            "A new manager knows which nodes have the latest plan of a collective; here a "
            "node with an earlier plan counts as one that has it, and is even believed to "
            "have finished, so the result hangs or is sealed incomplete."
        ),
    ),
    Mutant(
        "restoring-decides-before-all-is-said",
        "hoplite_mp/_planner/manager_recovery.py",
        "return wanted <= self._reported",
        "return wanted <= self.returned.keys()",
        (
            "A new manager decides when every node has reported all that it has; here it "
            "decides when all have called, and gives up living hosts whose reports are "
            "still coming in."
        ),
    ),
    Mutant(
        "owners-round-waits-for-a-second-death",
        "hoplite_mp/_planner/owners.py",
        "            open_.waiting.discard(node)\n            open_.reports.pop(node, None)\n",
        "            open_.reports.pop(node, None)\n",
        (
            "Objects of a dead host get new owners although a second host dies before it "
            "has reported; here its report is awaited for ever, and readers of these "
            "objects hang."
        ),
    ),
    Mutant(
        "owners-questions-of-a-round-are-dropped",
        "hoplite_mp/_planner/owners.py",
        ("        for message in open_.asked:\n            sends += self.asked(message)\n"),
        "",
        (
            "A process that meets a ref while a new owner is being found gets an answer at "
            "the end of the round; here the question is dropped, and the reader hangs."
        ),
    ),
    Mutant(
        "owners-round-overlooks-a-later-owner",
        "hoplite_mp/_planner/owners.py",
        "and (living(owner) or owner in self._rounds):",
        "and living(owner):",
        (
            "An actor that has moved twice goes on at the host that keeps its newest state; here "
            "the round about its first host ends first, and gives it to a host that cannot begin "
            "it: its calls fail, and its name stays taken."
        ),
    ),
    Mutant(
        "group-restart-restores-what-has-ended",
        "hoplite_mp/_planner/group_recovery.py",
        "            if shown.generation in over:",
        "            if shown.generation in over and shown.name in self.groups:",
        (
            "A Group has its board alone; here a new manager restores one that has ended on the "
            "board of a later one, whose members on one host are told that it has ended."
        ),
    ),
    Mutant(
        "owners-second-death-is-overlooked",
        "hoplite_mp/_planner/owners.py",
        "for node in (owner, first) if",
        "for node in (first,) if",
        (
            "An object whose second owner has died as well gets a third one; here who asks "
            "meanwhile is told that nobody has it, and reads ObjectLostError although a "
            "copy lives."
        ),
    ),
    Mutant(
        "owners-dead-before-the-manager-are-lost",
        "hoplite_mp/_planner/owners.py",
        "            awaited = [*self._rounds]",
        "            awaited = []",
        (
            "Who asks for the owner of an object whose host had died before the manager was "
            "started again waits for the reports; here it is told that nobody has it, and "
            "reads ObjectLostError although a copy lives."
        ),
    ),
    Mutant(
        "machine-restart-keeps-absent-nodes",
        "hoplite_mp/_planner/planner_core.py",
        (
            "            for node in self.membership.nodes:\n"
            "                if node not in restoring.returned:\n"
            "                    sends += self._end(node, now)\n"
        ),
        "",
        (
            "A host that died together with the manager is lost under the next manager; "
            "here it stays a member for ever, and who waits for it hangs."
        ),
    ),
    Mutant(
        "machine-leaves-while-needed",
        "hoplite_mp/_planner/planner_core.py",
        "if not self.copies.needs(node) and not self.reductions.needs(node)",
        "if not self.copies.needs(node) or not self.reductions.needs(node)",
        (
            "A leaving host goes when nothing that runs needs it; here it is let go while "
            "it still takes part in a collective or a copy, which loses its sources."
        ),
    ),
    Mutant(
        "machine-full-receiver-is-not-told",
        "hoplite_mp/_planner/planner_core.py",
        ("return sends + self.reductions.about_copy(message.object, refused, now)"),
        "return sends",
        (
            "A broadcast to a host that has no room for the copy fails with an error; here "
            "the operation goes on waiting for that host, and its caller hangs."
        ),
    ),
    Mutant(
        "terms-vote-while-bound",
        "hoplite_mp/_planner/terms.py",
        "if not again and (term <= self.term or not self.is_free(now)):",
        "if not again and term <= self.term:",
        (
            "Two managers never decide at one time; here a host votes for the standby "
            "although it has just promised to follow the manager, so the manager's lease "
            "may not have run out when the standby leads."
        ),
    ),
    Mutant(
        "terms-half-is-a-majority",
        "hoplite_mp/_planner/terms.py",
        "return hosts.has_majority(set(known))",
        "return hosts.has_half(set(known))",
        (
            "A standby leads only with more than half of the hosts; here half of them "
            "suffice, and a cluster that is cut in the middle has two managers."
        ),
    ),
    Mutant(
        "loop-old-connection-ends-the-new-life",
        "hoplite_mp/_manager/loop.py",
        ("if admitted is not None and self._routes.get(admitted.node) is link:\n            del"),
        ("if admitted is not None and admitted.node in self._routes:\n            del"),
        (
            "A host that has called its manager again is not affected by the late end of "
            "its first connection; here that end takes its way to the manager away, and a "
            "living host is lost."
        ),
    ),
    Mutant(
        "loop-newcomers-are-forgotten",
        "hoplite_mp/_manager/loop.py",
        ("        self._wake_at = result.wake_at\n        self._admit_newcomers()"),
        "        self._wake_at = result.wake_at",
        (
            "A host that joins while a manager is being started again is let in as soon as "
            "the others have reported; here it is never answered, and its start fails."
        ),
    ),
    Mutant(
        "loop-silent-host-stays",
        "hoplite_mp/_manager/loop.py",
        ("                link.stream.flush()\n            self._end(link)"),
        "                link.stream.flush()",
        (
            "A host from which nothing has come for too long is given up, so its tasks run "
            "elsewhere; here its connection stays, the planner never hears of the loss, "
            "and who waits for that host hangs."
        ),
    ),
    Mutant(
        "beats-own-pause-is-their-silence",
        "hoplite_mp/_manager/heartbeats.py",
        (
            "        if late > self._interval_s:  # this process did not run\n"
            "            for silence in self._silences.values():\n"
            "                silence.excuse(late)\n"
        ),
        "",
        (
            "Time in which the manager itself did not run is nobody's silence; here a "
            "manager that stood still for a while gives up hosts that were alive all the "
            "time."
        ),
    ),
    Mutant(
        "packed-trees-inner-hosts-serve-nobody",
        "hoplite_mp/_planner/program.py",
        "        return (None if place is None else row[place]), node in row",
        "        return (None if place is None else row[place]), place is None",
        (
            "A receiver of a broadcast along packed trees passes on what it receives; here the "
            "hosts below it wait for ever."
        ),
    ),
    Mutant(
        "packed-trees-receivers-are-not-told",
        "hoplite_mp/_planner/program.py",
        "return list(dict.fromkeys((*plan.sources[:1], *plan.receivers, *rows)))",
        "return list(dict.fromkeys((*plan.sources[:1], *rows)))",
        (
            "Every receiver of a broadcast along packed trees has its plan; here those that are "
            "leaves of all trees have none, and wait for ever."
        ),
    ),
    Mutant(
        "plan-log-plans-are-never-done",
        "hoplite_mp/_planner/broadcast.py",
        "transfer.record.finish(node, now, last=len(transfer.waiting) == 1)",
        "transfer.record.finish(node, now, last=not transfer.waiting)",
        (
            "`explain` shows the plan of a broadcast as done when all receivers have it; here it "
            "is shown as running for ever."
        ),
    ),
    Mutant(
        "plan-log-replaced-plans-run-on",
        "hoplite_mp/_planner/broadcast.py",
        '            transfer.record.state = "replaced"\n',
        "            pass\n",
        (
            "`explain` shows which plan of a broadcast was replaced after a death; here both plans "
            "seem to run."
        ),
    ),
    Mutant(
        "plan-log-broadcasts-have-no-plan",
        "hoplite_mp/_planner/reduce.py",
        "            self._log.share(result, object_id)\n",
        "            pass\n",
        (
            "`explain` of a broadcast's Future shows the plan of its object; here it says that "
            "there is none."
        ),
    ),
)
