"""Runs a backend's tracer in a separate process to get exact numbers, and caches its answers."""
