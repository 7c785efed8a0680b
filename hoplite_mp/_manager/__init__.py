"""The manager process: its loop passes messages to the planner, and the planner's plans to
nodes."""
