"""Recovery after the loss of a host: lineage, replica queries, reconstruction of lost results."""
