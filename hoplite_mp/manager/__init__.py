"""The manager process: the loop that carries messages to the planner and its plans to the nodes."""
