"""Estimates what a plan needs: bytes by component and phase, and time. To *price* a plan means to make this estimate."""
