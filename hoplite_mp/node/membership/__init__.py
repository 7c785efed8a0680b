"""The other nodes: who is there, connections to them, rates of links."""
