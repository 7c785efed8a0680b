"""The template process and parent of all others of a host."""
