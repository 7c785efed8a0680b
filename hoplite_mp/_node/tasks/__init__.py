"""Workers, pools, resources, inbound and outbound tasks, and cleanup after dead processes."""
