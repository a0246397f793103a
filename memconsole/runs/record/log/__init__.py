"""The event log of an attempt: its records, its lines, its writer and its readers."""
