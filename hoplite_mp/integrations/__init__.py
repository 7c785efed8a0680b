"""Front ends: this library behind the faces of others. Each module imports its engine."""
