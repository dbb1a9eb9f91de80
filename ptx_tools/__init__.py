"""PTX: parse, print, instrument, decide, interpret. A library in its own right; it needs NumPy and nothing of torch."""
