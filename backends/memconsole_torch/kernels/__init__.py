"""Triton programs for GPUs, and the functions that call them. Where Triton is missing, torch's own operations do the same
work, in more memory and time."""
