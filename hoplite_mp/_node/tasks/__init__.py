"""Workers, pools, resources, tasks of and for other hosts, cleanup after dead processes."""
