"""One launched run: its directory, its events, its processes."""
