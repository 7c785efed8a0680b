"""Front ends: this library behind the APIs of others. Each module imports its engine."""
