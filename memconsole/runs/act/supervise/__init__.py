"""The supervisor: starts a trainer, watches it, serves requests and records how it ended."""
