"""Whether a run lives, and why an attempt ended."""
