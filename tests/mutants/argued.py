"""Mistakes of the list that no program on a cluster can notice, and why.

A mutant that nobody sees is either a promise that nothing checks, or no promise. For each of these
somebody has followed what the changed line leads to, and says what keeps it harmless.
"""

from __future__ import annotations

__all__ = ["ARGUED"]

# Name of the mutant -> why nothing that is promised depends on that line.
ARGUED: dict[str, str] = {
    "group-calls-frees-parts-of-the-dead": (
        "An attempt pins what members of its node give (`prepare` of PlanRunner) until after the "
        "commit, when the results have been made of it. A node commits an attempt only if it has "
        "begun it, or has no member whose part the result needs. A decision without a plan is that "
        "of one node, which leads, and decides again without a member that has died."
    ),
    "group-restart-overlooks-the-unheard": (
        "A node that never received a version has a member that the new planner does not know "
        "(else _reassign_unreached has found its request, and counts the node). Such a rank is "
        "free, so the planner makes the next version at once (GroupRegistry._settled), and sends "
        "it to that node as well, which is in GroupRecord.nodes. The node sees that it has missed "
        "versions, and says by itself that nothing comes from ranks that are free "
        "(PointToPoint._report_free_ranks)."
    ),
}
