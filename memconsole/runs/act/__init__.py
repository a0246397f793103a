"""Starts, supervises, controls and ends runs."""
