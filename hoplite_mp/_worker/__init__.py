"""The worker: a process that runs tasks."""
