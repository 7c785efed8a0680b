"""Groups: membership, collective calls, and messages between two members."""
