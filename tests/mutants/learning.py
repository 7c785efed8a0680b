"""Mistakes in robust and compressed reductions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FOLDS = "hoplite_mp/_group/slice_folds.py"
OPERATIONS = "hoplite_mp/ml/_member_operations.py"
FEEDBACK = "hoplite_mp/ml/_feedback.py"

MUTANTS = (
    Mutant(
        "slice-folds-go-on-without-a-rank",
        FOLDS,
        "        if self._calls.contributors != tuple(ranks):\n            raise _Again\n",
        "",
        (
            "If a rank dies in a robust reduction, the others begin it again with new slices; here "
            "they go on, and the dead rank's slice of the result is missing."
        ),
    ),
    Mutant(
        "slice-folds-replaced-rank-interrupts-them",
        FOLDS,
        "                if MISMATCH not in str(error):\n                    raise\n",
        "                raise\n",
        (
            "A rank that is replaced during a robust reduction takes part in it; here all ranks "
            "raise an error of different calls."
        ),
    ),
    Mutant(
        "slice-folds-replaced-rank-gives-up",
        FOLDS,
        "interrupts = self._member.calls is None",
        "interrupts = False",
        (
            "A rank that is replaced begins with the reduction that the others make; here it "
            "raises an error of different calls if it meets them in the middle."
        ),
    ),
    Mutant(
        "slice-folds-lost-slices-are-a-new-call",
        FOLDS,
        "raise _Again(is_alone=True) from None",
        "raise",
        (
            "A rank whose slices are lost with the deciding host begins the reduction again, with "
            "the others; here it raises an error, while the others still reduce."
        ),
    ),
    Mutant(
        "slice-folds-names-indices-as-ranks",
        FOLDS,
        "contributors = tuple(taking[index] for index in accepted)",
        "contributors = tuple(accepted)",
        (
            "The contributors are ranks; here they are indices of the inputs, which differ when a "
            "rank is dead or left out."
        ),
    ),
    Mutant(
        "slice-folds-mean-of-all",
        FOLDS,
        "            total /= len(accepted)\n",
        "            total /= len(ranks)\n",
        "With finite=True the mean is that of the finite arrays; here it is divided by all ranks.",
    ),
    Mutant(
        "feedback-keeps-a-slice-of-others",
        FEEDBACK,
        "            stream.owned = stream.factor = None\n            stream.owner_notes = {}\n",
        "            stream.factor = None\n",
        (
            "Owners drop what they have kept of their slice when slices move; here they add it to "
            "another slice."
        ),
    ),
    Mutant(
        "feedback-owners-forget",
        FEEDBACK,
        "        if stream.owned is not None:\n            folded += stream.owned\n",
        "",
        "What an owner's code leaves out of its slice is sent later; here it is lost.",
    ),
    Mutant(
        "feedback-sent-is-kept-as-well",
        FEEDBACK,
        "        compressor.add(code, folded, step, members.index(rank), -1.0)\n",
        "",
        "What an owner has sent of its slice is not kept; here it is sent again with each call.",
    ),
    Mutant(
        "member-operations-count-the-dead",
        OPERATIONS,
        "            if not may_shrink:\n                raise _Again\n",
        "",
        (
            "If a rank dies in the middle of an operation, the others make it again without it; "
            "here they go on with slices of other bounds."
        ),
    ),
    Mutant(
        "member-operations-lost-part-is-an-error",
        OPERATIONS,
        "            raise _Again from None  # the others are",
        "            raise  # the others are",
        (
            "A rank whose part of a call is lost with a host begins the operation again, with the "
            "others; here it raises PeerLostError in a Group that is not strict."
        ),
    ),
    Mutant(
        "member-operations-newcomer-at-step-zero",
        OPERATIONS,
        "            self._take(state)\n",
        "            pass\n",
        (
            "A rank that is replaced receives the common state; here it begins at step 0, and all "
            "ranks refuse its codes."
        ),
    ),
    Mutant(
        "fold-refs-that-are-not-finite",
        "hoplite_mp/_api/collectives.py",
        "                if finite and not is_finite(np.asarray(value)):\n",
        "                if not finite and not is_finite(np.asarray(value)):\n",
        "With finite=True a source with a NaN counts as failed; here it is folded.",
    ),
)
