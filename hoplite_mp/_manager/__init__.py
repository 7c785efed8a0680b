"""The manager process: its loop passes messages to the planner, and plans to nodes."""
