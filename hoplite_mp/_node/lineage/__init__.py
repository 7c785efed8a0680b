"""Recovery after the loss of a host: new owners of its objects, reconstruction of lost results."""
