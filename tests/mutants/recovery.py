"""Mistakes in what becomes of objects whose host is gone."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "owners-early-release-is-forgotten",
        "hoplite_mp/_node/objects/ownership_transfer.py",
        "gone = peer is None or (object_id, peer, number) in lost.pending_releases",
        "gone = peer is None",
        (
            "A host that lets go of an object just before the object's new owner knows its "
            "office is not counted there; here it is, and the object is never freed."
        ),
    ),
    Mutant(
        "owners-loses-what-was-asked-about",
        "hoplite_mp/_node/objects/ownership_transfer.py",
        (
            "            if record.number not in lost.asked:\n"
            "                self._lose(record, lost)"
        ),
        "            self._lose(record, lost)",
        (
            "A process that meets a ref while a new owner is being found waits for the "
            "manager's answer; here its object is declared lost at the end of the round, "
            "although another host has a copy."
        ),
    ),
    Mutant(
        "owners-question-dies-with-the-manager",
        "hoplite_mp/_node/objects/ownership_transfer.py",
        "unresolved = is_kept(record) or (record.number and not record.described)",
        "unresolved = is_kept(record)",
        (
            "A process that asks who is the owner of an object gets an answer also if the "
            "manager dies meanwhile; here the next manager is not asked, and the reader "
            "hangs."
        ),
    ),
    Mutant(
        "owners-reported-import-is-not-acquired",
        "hoplite_mp/_node/objects/ownership_transfer.py",
        "if record.number and (record.number != number or not record.described):",
        "if record.number and record.number != number:",
        (
            "A process that meets an object after its new owner has taken over can read it, even "
            "if its host hears of that owner from the next manager only; here that owner is not "
            "asked, and the reader hangs."
        ),
    ),
    Mutant(
        "owners-nobody-is-not-told",
        "hoplite_mp/_node/objects/ownership_transfer.py",
        "        self.events.ownerless(record)",
        "        pass",
        (
            "Calls of an actor whose host is lost end, also if nobody is named as its new host; "
            "here they are told of a new host only, and wait for ever if there is none."
        ),
    ),
    Mutant(
        "recovering-host-stays-dead",
        "hoplite_mp/_node/lineage/recovery.py",
        "        self.owners.back(host_id)",
        "        pass",
        (
            "A host that was given up may have the next manager, if a user promotes its standby. "
            "Its objects are read again by hosts that had heard of its death; here those wait for "
            "a new owner, whom no manager will name."
        ),
    ),
    Mutant(
        "holdings-are-not-held",
        "hoplite_mp/_node/objects/ownership_transfer.py",
        "        self.hold(lost, self.of(host_id))\n",
        "",
        (
            "Copies of a dead host's objects stay on the living hosts until the manager "
            "has named new owners; here they may go in between, and objects are lost that "
            "had a copy."
        ),
    ),
    Mutant(
        "lineage-drops-a-shared-argument",
        "hoplite_mp/_node/lineage/lineage.py",
        "                if not held.count:",
        "                if held.count <= 1:",
        (
            "An argument is kept as long as the result of any task that read it may have "
            "to be made again; here it goes when one of two such results goes, and the "
            "other cannot be made again after a death."
        ),
    ),
    Mutant(
        "lineage-does-not-count-runs",
        "hoplite_mp/_node/lineage/lineage.py",
        'self.client.inspect(oid)["retries_left"] - entry.spent',
        'self.client.inspect(oid)["retries_left"]',
        (
            "A task runs at most 1 + retries times, lost results included; here runs for "
            "lost results are not subtracted, and a task with side effects runs more often "
            "than its user allowed."
        ),
    ),
    Mutant(
        "reconstruction-does-not-wait-for-answers",
        "hoplite_mp/_node/lineage/reconstruction.py",
        "if isinstance(got, int) or not self.replica_query.answered(run.question):",
        "if isinstance(got, int):",
        (
            "While any host has the first value of a result nobody reads another one; here "
            "the value of the second run is taken before all hosts have said whether they "
            "have the first, and two readers can see different values."
        ),
    ),
    Mutant(
        "reconstruction-gives-up-after-a-second-death",
        "hoplite_mp/_node/lineage/reconstruction.py",
        ("        self._end(run)\n        self._ask_arguments(run.target)"),
        "        self._end(run)",
        (
            "A lost result is made again as often as its retries allow; here, if the host "
            "that made it again dies as well before the bytes were fetched, nobody begins "
            "anew and the reader hangs."
        ),
    ),
    Mutant(
        "reconstruction-does-not-await-the-new-owner",
        "hoplite_mp/_node/lineage/reconstruction.py",
        "if self.owners.is_open(record.owner) or record.owner in self.roster.by_host_id",
        "if record.owner in self.roster.by_host_id",
        (
            "An object whose owner has died is read from another host that has a copy; here "
            "readers get ObjectLostError at once, although the manager is just finding out "
            "who has one."
        ),
    ),
    Mutant(
        "reconstruction-asks-the-owner-once",
        "hoplite_mp/_node/lineage/reconstruction.py",
        "            self.loop.call_later(ASK_S, lambda: self._ask(oid, record))",
        "            pass",
        (
            "An owner that hears of a death later than a reader's host is asked again until "
            "it knows; here it is asked once, and the reader hangs."
        ),
    ),
    Mutant(
        "questions-wait-for-the-dead",
        "hoplite_mp/_node/questions.py",
        "            self._end(number, None)\n\n    def _end",
        "            pass\n\n    def _end",
        (
            "A host that dies is not waited for, before a lost result is made again as little "
            "as elsewhere; here its answer stays outstanding for ever, and so does the result."
        ),
    ),
    Mutant(
        "releases-take-the-copy-along",
        "hoplite_mp/_node/objects/imports.py",
        "Release(record.object, record.number, keeps))\n        record.number = 0",
        "Release(record.object, record.number))\n        record.number = 0",
        (
            "A process lets go of an object of which its host has been given a copy, which stays; "
            "here the owner holds the object for lost."
        ),
    ),
)
