"""Estimates what a plan needs: bytes by component and phase, and time."""
