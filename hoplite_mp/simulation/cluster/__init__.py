"""A cluster of real nodes, managers and clients, in virtual time and in one process."""
