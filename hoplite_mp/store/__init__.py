"""The store's decisions: where a block is placed, and how much memory the host can spare. Apart
from reading limits these are pure functions; shared memory is changed by the node."""
