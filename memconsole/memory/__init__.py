"""What a plan costs: bytes by component and phase, and time."""
