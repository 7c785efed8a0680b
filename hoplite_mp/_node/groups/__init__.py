"""Groups: membership, collective calls, messages between two members."""
