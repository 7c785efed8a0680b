"""Front ends: this library behind the APIs of other libraries, one module for each."""
