"""Front ends, which offer this library through the APIs of other libraries: one module for each."""
