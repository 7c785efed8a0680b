"""The programs of a run: groups, actors, queues, deadlines, lost hosts and full stores."""
