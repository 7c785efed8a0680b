"""The other nodes: connections to them, loss of contact, latencies and link rates."""
