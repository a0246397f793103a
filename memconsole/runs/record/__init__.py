"""The files of a run: its directory, events, locks and small records."""
