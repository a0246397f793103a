"""The summary of a run: its report, its receipt, and its estimate compared with the measurement."""
