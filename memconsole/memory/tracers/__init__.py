"""Asks a backend's tracer for exact numbers, in a process of its own, and keeps the answers."""
