"""Mistakes in how objects are kept, sent, spilled and let go of."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "exports-tells-one-importer",
        "hoplite_mp/_node/objects/exports.py",
        "for peer, number in list(export.importers):",
        "for peer, number in list(export.importers)[:1]:",
        (
            "When a pending object is done, every host that holds it hears so; here one "
            "host hears, and readers on all other hosts hang."
        ),
    ),
    Mutant(
        "exports-again-keeps-the-last-asker",
        "hoplite_mp/_node/objects/exports.py",
        "asks = self.again.setdefault(oid, {})",
        "asks = self.again[oid] = {}",
        (
            "Every host that reads a lost result gets its value once the owner has made it "
            "again; here the host that asked first is forgotten as soon as another one "
            "asks, and its reader hangs."
        ),
    ),
    Mutant(
        "imports-ask-waits-for-the-first",
        "hoplite_mp/_node/objects/imports.py",
        "        left = len(open_)\n",
        "        left = min(1, len(open_))\n",
        (
            "Several refs that travel together are held by their owners before the sender "
            "may let go; here the first owner's answer counts for all, and an object of "
            "another owner can be freed on the way."
        ),
    ),
    Mutant(
        "imports-kept-copy-is-not-counted",
        "hoplite_mp/_node/objects/imports.py",
        "if not known.number and known.owner not in (self.client.host_id, holder):",
        (
            "if not known.number and not known.kept and known.owner not in "
            "(self.client.host_id, holder):"
        ),
        (
            "A ref that a process takes to an object of which its host keeps a copy counts "
            "at the owner; here the owner does not hear of the process, frees the object, "
            "and the ref cannot be passed on to other hosts."
        ),
    ),
    Mutant(
        "imports-result-made-here-is-not-counted",
        "hoplite_mp/_node/objects/imports.py",
        "if not known.number and known.owner not in (self.client.host_id, holder):",
        (
            "if not known.number and known.kept and known.owner not in "
            "(self.client.host_id, holder):"
        ),
        (
            "A process that holds the result of another host's task, which has run on its own "
            "host, counts at the owner; here the owner frees the result although an actor holds "
            "it, and who is given the ref back reads that the object is lost."
        ),
    ),
    Mutant(
        "kept-lent-to-the-last-host-only",
        "hoplite_mp/_node/objects/exports.py",
        "export.copies.update({*hosts} - {self.client.host_id})",
        "export.copies = {*hosts} - {self.client.host_id}",
        (
            "When nobody wants an object any more, all copies that collectives have left "
            "on other hosts go; here only the host that reported last is told, and the "
            "copies of the others stay for ever."
        ),
    ),
    Mutant(
        "kept-overlooks-processes",
        "hoplite_mp/_node/objects/exports.py",
        'return counts[0] == ours and self.client.inspect(oid)["refs"] == [NODE_SLOT]',
        "return counts[0] == ours",
        (
            "A copy on another host stays as long as any process holds the object; here "
            "the node looks at its own holds alone, so copies go while refs to them are "
            "alive, also the only copy of a result."
        ),
    ),
    Mutant(
        "remote-objects-block-is-free-too-early",
        "hoplite_mp/_node/objects/remote_objects.py",
        "            remote.engine_buffer.when_free(lambda: self.store.free(payload))",
        "            self.store.free(payload)",
        (
            "A block is given to somebody else only after the last byte of a transfer that "
            "was given up has been written; here the bytes of the old transfer can "
            "overwrite another object."
        ),
    ),
    Mutant(
        "remote-objects-runner-keeps-the-result",
        "hoplite_mp/_node/objects/remote_objects.py",
        ("        done()\n    if remote.released is not None:\n        remote.released()"),
        "        done()",
        (
            "A host that has run a task for another one lets go of the big result when "
            "that host has fetched or dropped it; here the runner never hears of it, and "
            "keeps every such result for ever."
        ),
    ),
    Mutant(
        "store-spilled-pieces-are-the-first",
        "hoplite_mp/_node/store/budget.py",
        "self.spill.read(position + offset, memoryview(data))",
        "self.spill.read(position, memoryview(data))",
        (
            "A spilled object that is read from the file a piece at a time has the value "
            "that was put; here every piece is the beginning of the object."
        ),
    ),
    Mutant(
        "store-refused-spill-is-not-undone",
        "hoplite_mp/_node/store/budget.py",
        ("            self.client.spill_abort(oid)\n            return False"),
        "            return False",
        (
            "An object that the full disk did not take can be read as before; here its "
            "header stays in the state of a spill that never ends, and its readers hang."
        ),
    ),
    Mutant(
        "results-refs-go-before-they-are-taken",
        "hoplite_mp/_node/objects/results.py",
        "if self.tasks.taken(oid):",
        "if not self.tasks.taken(oid):",
        (
            "Refs inside a result that comes from another host are held by the node until "
            "their owner has taken them over; here the node lets go before that, the "
            "objects can be lost, and those that were taken over are held for ever."
        ),
    ),
    Mutant(
        "leases-asks-for-room-once",
        "hoplite_mp/_node/objects/leases.py",
        (
            "                self.client.set_hungry(True)\n"
            "                self.loop.call_later(RETRY_S, again)"
        ),
        "                self.client.set_hungry(True)",
        (
            "A process that finds the store full gets its room, or StoreFullError, after a "
            "while; here the node never looks a second time and never answers, so the "
            "process hangs."
        ),
    ),
    Mutant(
        "imports-deleted-early-is-not-settled",
        "hoplite_mp/_node/objects/imports.py",
        'elif self.client.state(record.oid) == STATE["ABORTED"] and not record.runs_here:',
        "elif False:",
        (
            "What a process has deleted is freed on both hosts; here the header of a result "
            "that was deleted before it was made stays for ever, and so does its owner's."
        ),
    ),
    Mutant(
        "exports-importers-of-the-dead-stay",
        "hoplite_mp/_node/objects/exports.py",
        "importer for importer in export.importers if importer[0] != member.host_id",
        "importer for importer in export.importers",
        (
            "An object goes when no living host holds it; here the imports of a host that has died "
            "count for ever."
        ),
    ),
)
