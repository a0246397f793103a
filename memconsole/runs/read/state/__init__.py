"""A run's events folded into its state, and what follows from that state alone."""
