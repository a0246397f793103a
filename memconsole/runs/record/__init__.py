"""The files of a run: directory, events, locks and the small records beside them."""
