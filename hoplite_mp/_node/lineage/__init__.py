"""Recovery after the loss of a host: lineage, replica queries, and reconstruction of results."""
