"""After a loss: who owns an object now, and making it again."""
