"""The template process, which is the parent of all other processes of a host."""
