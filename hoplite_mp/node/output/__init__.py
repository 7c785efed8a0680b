"""Lines that workers print, on their way to a program."""
