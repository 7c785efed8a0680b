"""The connection to the manager: joining, heartbeats, failover, and join waiters."""
