"""Lines that workers print, on their way to the drivers that they are for."""
