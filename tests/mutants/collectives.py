"""Mistakes in how a node carries out plans."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "operations-one-deleted-slice-drops-all",
        "hoplite_mp/_node/collectives/operations.py",
        "if all(self.client.state(oid) in UNWANTED for oid in operation.ask.results):",
        "if any(self.client.state(oid) in UNWANTED for oid in operation.ask.results):",
        (
            "A program may delete one slice of a reduce_scatter and read the others; here "
            "the whole operation is dropped, and readers of the other slices hang."
        ),
    ),
    Mutant(
        "operations-moved-source-is-an-error",
        "hoplite_mp/_node/collectives/operations.py",
        "moved = bool(gone) and all(self.client.state(oid) in VALUED for oid in gone)",
        "moved = False",
        (
            "A reduction goes on if a source is only no more where it was to be read, but "
            "can be had elsewhere; here it fails although every source lives."
        ),
    ),
    Mutant(
        "plan-runner-says-reported-too-early",
        "hoplite_mp/_node/execution/plan_runner.py",
        "yield ReportedReduce(self.client.number, execution.plan, execution.reported)",
        "yield ReportedReduce(self.client.number, execution.plan, execution.begun)",
        (
            "A manager that is started again commits a collective when every node has its "
            "part; here a node that has only begun counts as done, and the result is "
            "sealed with bytes that have not come."
        ),
    ),
    Mutant(
        "plan-runner-abandoned-copy-is-not-fetched",
        "hoplite_mp/_node/execution/plan_runner.py",
        (
            "        for oid in list(execution.copies.values()):\n"
            "            self.remote_objects.let_go(oid)\n"
        ),
        "",
        (
            "A process that waits for a copy which a gather was bringing gets it in "
            "another way if the gather ends; here nobody fetches the copy, its block is "
            "never free, and the reader hangs."
        ),
    ),
    Mutant(
        "plan-runner-gives-copies-of-one-object-one-number",
        "hoplite_mp/_node/execution/plan_state.py",
        "return COPY_OPERATION | plan.epoch if copies else plan.operation",
        "return plan.operation",
        (
            "A host serves one object by several plans at once; here the next plan ends the one "
            "before, and its receiver waits for ever."
        ),
    ),
    Mutant(
        "transfers-gaps-count-as-come",
        "hoplite_mp/_node/execution/plan_state.py",
        "found.add(first, begin + watermark(cell))",
        "found.add(begin, begin + watermark(cell))",
        (
            "A copy that was planned anew after deaths holds every byte of its object; "
            "here a gap in front of a later piece counts as filled, and the copy keeps a "
            "hole."
        ),
    ),
    Mutant(
        "transfers-restart-forgets-requests",
        "hoplite_mp/_node/execution/transfers.py",
        "if object_id not in planned and remote is not None:",
        "if object_id in planned and remote is not None:",
        (
            "A fetch that the manager had not planned yet when it died is planned by the "
            "next one; here the next manager is not told of it, and the reader hangs."
        ),
    ),
    Mutant(
        "transfers-served-copy-is-not-pinned",
        "hoplite_mp/_node/execution/transfers.py",
        (
            "            if any(other.engine_buffer is shared for other in self._executions):\n"
            "                shared.keep.append(self.client.view(oid))\n"
        ),
        "",
        (
            "A copy from which other hosts still read stays in its block; here the block "
            "may be spilled or freed and used again meanwhile, and the other hosts receive "
            "wrong bytes."
        ),
    ),
    Mutant(
        "transfers-taken-back-in-silence",
        "hoplite_mp/_node/execution/transfers.py",
        (
            "        del self.fetching[object_id]\n"
            "        self.send_manager(CopyDropped(self.client.number, object_id))"
        ),
        "        del self.fetching[object_id]",
        (
            "A host that gave up a fetch may ask for the object again; here the manager "
            "goes on believing that the first fetch runs, ignores the second request, and "
            "the reader hangs."
        ),
    ),
    Mutant(
        "filling-does-not-follow-the-writer",
        "hoplite_mp/_node/execution/plan_cells.py",
        "        execution.follow(index, cell, at + begin, nbytes)\n        return cell\n",
        "        return cell\n",
        (
            "A large value that a member is still writing is sent as it grows; here the "
            "cell stays where it was when the plan came, and the call of the Group hangs."
        ),
    ),
    Mutant(
        "folding-takes-2d-fortran-as-c",
        "hoplite_mp/_node/execution/folding.py",
        'if info.order == "F" and len(info.shape) > 1:',
        'if info.order == "F" and len(info.shape) > 2:',
        (
            "Arrays in Fortran order are reduced like any others across hosts; here "
            "matrices in Fortran order are added element by element in the wrong places."
        ),
    ),
    Mutant(
        "carryover-name-ignores-members",
        "hoplite_mp/_node/execution/plan_state.py",
        "return SlotName(cell.node, *bounds, members)",
        "return SlotName(cell.node, *bounds, members[:1])",
        (
            "After a loss a contribution is used again only if it consists of the same "
            "members; here one that contains a source which is out counts as the same, so "
            "the value does not fit the contributors."
        ),
    ),
    Mutant(
        "chunked-reduce-forget-a-single-first-source",
        "hoplite_mp/_node/collectives/chunked_reduce.py",
        ("            if self.at:\n                addresses.insert(0, destination)"),
        ("            if self.at > 1:\n                addresses.insert(0, destination)"),
        (
            "A reduction over more than fits into memory contains every contributor; here "
            "the first source is left out if the first chunk was that source alone."
        ),
    ),
    Mutant(
        "plan-runner-waits-for-its-own-attempt",
        "hoplite_mp/_node/execution/plan_runner.py",
        "manager died before it sent Forget.\n            self.drop(message.operation)\n",
        "manager died before it sent Forget.\n",
        (
            "A commit ends an operation on all hosts, also on the one that has requested it and "
            "has a part in an earlier plan alone; here that host keeps its sources and cells for "
            "ever."
        ),
    ),
    Mutant(
        "execute-folds-errors",
        "hoplite_mp/_node/execution/local_reduce.py",
        "if results.is_gone(got)]",
        "if isinstance(got, int) and results.is_gone(got)]",
        (
            "A reduction leaves out sources that are lost while they are fetched; here the "
            "error in a source's place is taken for its value."
        ),
    ),
    Mutant(
        "transfers-own-result-is-not-awaited",
        "hoplite_mp/_node/execution/transfers.py",
        'if self.client.state(oid) == STATE["CLAIMED"] and self.loop.now() < execution.until:',
        "if False:",
        (
            "A result can be broadcast to the host that has sent the task; here the plan is "
            "refused if it comes before the message that the task is done."
        ),
    ),
)
