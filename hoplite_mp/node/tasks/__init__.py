"""Tasks and workers: pools, resources, tasks of other hosts."""
