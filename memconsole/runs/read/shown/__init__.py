"""What screens and commands show of a run, in words and figures."""
