"""The connection to the manager: joining, heartbeats, failover, clients that wait for the join."""
