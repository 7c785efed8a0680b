"""Lines that workers print, on their way to their drivers."""
