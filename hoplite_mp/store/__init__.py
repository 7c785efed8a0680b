"""The store's decisions: where a block is placed, and how much memory the host can spare. Apart
from reading limits this code is pure; only the node's code changes shared memory."""
