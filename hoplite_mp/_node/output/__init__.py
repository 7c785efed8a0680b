"""Workers' output: from the workers' pipes to the drivers."""
