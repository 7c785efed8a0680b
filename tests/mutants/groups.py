"""Mistakes in calls of Groups."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "small-calls-report-before-the-freeze",
        "hoplite_mp/_node/groups/engine_commit.py",
        "self.engine_calls.close(state, lambda: calls.backend(state).changed(state, members))",
        "calls.change(state, members)\n        self.engine_calls.close(state, lambda: None)",
        (
            "A node answers a change of the members after its engine has given the calls back; "
            "here it reports calls that are long over as undecided, and the engine commits "
            "another one after the report."
        ),
    ),
    Mutant(
        "group-calls-frees-parts-of-the-dead",
        "hoplite_mp/_node/groups/group_calls.py",
        (
            "                if called is not None and called.ask.call == state.calls and "
            "attempt is not None:\n"
            "                    state.left += called.holds  # the attempt may include them\n"
            "                elif called is not None:\n"
            "                    self.results.unpin(called.holds)"
        ),
        (
            "                if called is not None:\n"
            "                    self.results.unpin(called.holds)"
        ),
        (
            "A member that dies after its part was taken into a call is in the result of "
            "every rank; here the part is let go while the call is decided, and ranks on "
            "the dead member's host read a result without it."
        ),
    ),
    Mutant(
        "group-calls-overlooks-the-last-commit",
        "hoplite_mp/_node/groups/leader.py",
        "if message.committed > group.calls:",
        "if message.committed > group.calls + 1:",
        (
            "A call that one member has seen committed has the same result everywhere, "
            "also if its leader died; here the next leader does not take over the last "
            "commit and decides the same call a second time."
        ),
    ),
    Mutant(
        "group-calls-leads-without-the-former",
        "hoplite_mp/_node/groups/leader.py",
        "if not self._synced() >= self.group.knowing:",
        "if not self._synced() >= self.group.nodes:",
        (
            "Nobody decides a call that a member has read before it left; here the new "
            "leader does not wait for hosts whose members have left, and a call gets two "
            "results."
        ),
    ),
    Mutant(
        "group-calls-newcomer-one-call-early",
        "hoplite_mp/_node/groups/leader.py",
        "start = GroupStart(members.generation, members.version, rank, state.calls + 1)",
        "start = GroupStart(members.generation, members.version, rank, state.calls)",
        (
            "A member that joins later takes part from the first call that nobody has "
            "begun; here its own host lets it make the call before that, which the others "
            "decide without it."
        ),
    ),
    Mutant(
        "group-calls-failure-waits-for-all",
        "hoplite_mp/_node/groups/leader.py",
        "            attempt.waiting.clear()\n",
        "",
        (
            "If one host cannot have its part of a call, every rank raises that error; "
            "here the leader waits also for hosts that can never finish without it, and "
            "all ranks hang."
        ),
    ),
    Mutant(
        "group-calls-keep-attempts-that-are-over",
        "hoplite_mp/_node/groups/group_calls.py",
        "            self.attempt_bytes.drop(go)  # only now: members wait for the commit\n",
        "            pass\n",
        (
            "What a call has needed is freed when it is over; here the cells and the pins of each "
            "large call stay for ever."
        ),
    ),
    Mutant(
        "group-leading-forgets-early-reports",
        "hoplite_mp/_node/groups/leader.py",
        "        for node, report in self.early.items():",
        "        for node, report in ():",
        (
            "A host may have its part of a call before the leading host has heard from all; here "
            "that is forgotten, and all ranks hang."
        ),
    ),
    Mutant(
        "repeated-plans-count-all-pieces-as-one",
        "hoplite_mp/_node/groups/repeated_plans.py",
        "    return ids.pack_id(0, 1 + member)",
        "    return ids.pack_id(0, 1)",
        (
            "What has come of each piece is counted by itself; here all pieces of other hosts "
            "have one name while a plan is repeated, and blocks are lost when it is given up."
        ),
    ),
    Mutant(
        "repeated-plans-of-some",
        "hoplite_mp/_node/groups/repeated_plans.py",
        "    return len(named) == 1 and all(",
        "    return all(",
        (
            "A plan is repeated only if all hosts have begun by the same one; here the leading "
            "host waits for others that have begun by another, and all ranks hang."
        ),
    ),
    Mutant(
        "group-decisions-sum-to-the-root-alone",
        "hoplite_mp/_node/groups/group_decisions.py",
        ('if self.kind in ("reduce", "gather") and self.root not in ranks and not summed:'),
        'if self.kind in ("reduce", "gather") and self.root not in ranks:',
        (
            "A small reduce survives its leader if any host has heard the decision; here "
            "only the root's host gets the sum, so the root raises PeerLostError if the "
            "leader dies before telling it."
        ),
    ),
    Mutant(
        "group-decisions-parts-for-the-dead",
        "hoplite_mp/_node/groups/group_decisions.py",
        "if piece.source == rank and (piece.target < 0 or piece.target in taking)",
        "if piece.source == rank",
        (
            "An alltoall or a scatter goes on among the living when a member has died; "
            "here large parts for the dead rank stay in the decision, which fails inside "
            "of the leader, and all ranks hang."
        ),
    ),
    Mutant(
        "group-results-one-block-for-many",
        "hoplite_mp/_node/groups/group_results.py",
        "slot = mine[takers[0]] if len(takers) == 1 else 0",
        "slot = mine[takers[0]] if takers else 0",
        (
            "Each rank's result is its own array; here all ranks of a host get the block "
            "that belongs to one of them, so a write by one rank changes the result of "
            "another."
        ),
    ),
    Mutant(
        "group-results-inner-refs-are-not-held",
        "hoplite_mp/_node/groups/attempts.py",
        "if copies and part is not None and not failure:",
        "if copies and part is not None and failure:",
        (
            "Refs inside a large value that a Group's call brings can be read after the "
            "call, whatever the giver does; here the receiving host takes no hold on them, "
            "and they are lost when the giver lets go."
        ),
    ),
    Mutant(
        "groups-open-join-dies-with-the-manager",
        "hoplite_mp/_node/groups/groups.py",
        "        yield from (asked for _, asked in self.joining.values())\n",
        "",
        (
            "A process that is joining a Group when the manager dies becomes a member "
            "under the next manager; here the request is not said again, and the whole "
            "Group waits for that rank in vain."
        ),
    ),
    Mutant(
        "boxes-message-after-a-lost-one",
        "hoplite_mp/_node/groups/mailbox.py",
        ("kept = [one for at, one in enumerate(incoming) if at < whole or isinstance(one, End)]"),
        (
            "kept = [one for at, one in enumerate(incoming) if at < whole or isinstance(one, "
            "End) or one.ready]"
        ),
        (
            "What is received of a member whose host dies is a prefix of what it sent; "
            "here a later message is received although an earlier one was lost on the way."
        ),
    ),
    Mutant(
        "boxes-gone-before-its-messages",
        "hoplite_mp/_node/groups/mailbox.py",
        "gone = everybody & ~self._present & ~due if self._formed else 0",
        "gone = everybody & ~self._present if self._formed else 0",
        (
            "Everything that a member sent before it left is received; here recv raises as "
            "soon as the manager says that the member is gone, while its last messages are "
            "still on their way."
        ),
    ),
    Mutant(
        "point-to-point-never-met-who-has-left",
        "hoplite_mp/_node/groups/mailbox.py",
        "            self._await_unknown_members(group, knowing)\n",
        "",
        (
            "A node that has missed versions of a Group awaits what members may have sent of whom "
            "it has never heard; here what they sent before they left is lost."
        ),
    ),
    Mutant(
        "group-leading-narrows-within-an-attempt",
        "hoplite_mp/_node/groups/leader.py",
        "            self._next_attempt(),\n            outcome,",
        "            self._next_attempt() if slow is None else slow.number,\n            outcome,",
        (
            "What a host has received for one plan of a call never counts for another one; here a "
            "plan that takes the stripe of a slow host has the number of the one before it."
        ),
    ),
    Mutant(
        "speculative-start-takes-what-comes",
        "hoplite_mp/_node/groups/leader.py",
        "                if not fits(part, attempt.outcome.plans[0]):",
        "                if part.mistake:",
        (
            "If one rank gives something else than the others, every rank raises that error; here "
            "a call that has begun without it waits for it for ever."
        ),
    ),
    Mutant(
        "voted-calls-begin-in-silence",
        "hoplite_mp/_node/groups/engine_commit.py",
        "        self.engine_calls.engine.coll_begin(go.generation, go.call, go.attempt)\n",
        "",
        (
            "If members make different calls, every rank hears of it; here a node that has begun "
            "to move does not say so, and waits for ever for bytes of others who move by another "
            "plan."
        ),
    ),
    Mutant(
        "group-calls-looks-at-no-board",
        "hoplite_mp/_node/groups/engine_commit.py",
        "        if state.known.board.look()[4] > call:",
        "        if call < 0:",
        (
            "What the engine has committed is its members'; here a node that has not heard of it "
            "yet gives it up when a member makes its next call."
        ),
    ),
    Mutant(
        "plan-sources-fresh-plan-without-all",
        "hoplite_mp/_node/groups/plan_sources.py",
        (
            "        if not undecided.is_complete:\n"
            "            return None\n"
            "        return PlannedCall(decide_or_fail(undecided, before"
        ),
        "        return PlannedCall(decide_or_fail(undecided, before",
        (
            "A large allreduce whose last member is late begins without it, by a plan that assumes "
            "what it gives; here a plan is made as if all had called, which fails, and every rank "
            "raises an error."
        ),
    ),
    Mutant(
        "plan-sources-repeated-plan-begins-twice",
        "hoplite_mp/_node/groups/plan_sources.py",
        "return PlannedCall(outcome, begun=True) if repeat(outcome, begun) else None",
        "return PlannedCall(outcome) if repeat(outcome, begun) else None",
        (
            "Hosts that have all begun by the plan of an earlier call go on by it; here the "
            "leading host asks them to begin once more, with parts that it does not know."
        ),
    ),
    Mutant(
        "plan-sources-repeated-plan-that-has-failed",
        "hoplite_mp/_node/groups/leader.py",
        "return None if any((one.call, one.attempt) == about for one in failed) else begun",
        "return begun",
        (
            "A call that a host cannot make by the plan of an earlier one, because its store is "
            "full, gets another plan, which waits for space; here the first one is taken again and "
            "again."
        ),
    ),
)
