"""Front ends: this library behind the APIs of other libraries, with one module for each."""
