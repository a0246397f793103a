"""A run read from its files: its state, its story, its report."""
