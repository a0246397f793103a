"""Estimates what a plan needs: bytes by component and phase, and time.

To *price* a plan is to make this estimate, and its *price* is the result.
"""
