"""Exact numbers of a step, from a trace or a compiler, and how they replace the formula's numbers in the memory table."""
