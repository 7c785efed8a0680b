"""The template process, which is the parent of all other processes on a host."""
