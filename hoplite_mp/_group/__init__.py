"""Groups: processes that make collective calls together, and send each other messages."""
