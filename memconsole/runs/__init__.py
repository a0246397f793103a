"""A launched run: its directory, its events and its processes."""
