"""Reads a run from its files: its state, its history and its report."""
