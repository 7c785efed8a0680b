"""What the programs of a run do: groups, actors, queues, deadlines, lost hosts and full stores."""
