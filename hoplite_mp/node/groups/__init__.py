"""Groups: members, calls, messages between two members."""
