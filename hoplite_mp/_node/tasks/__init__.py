"""Workers, pools, resources, tasks of and for other hosts, clean-up after dead processes."""
