"""Windows of numbers for regression: their file, how it is divided, and the order of its rows."""
