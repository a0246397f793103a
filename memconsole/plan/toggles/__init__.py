"""The rows of the optimizations, grouped by what they reduce."""
