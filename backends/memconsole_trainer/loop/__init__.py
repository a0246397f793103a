"""The training loop: set-up, steps, saving, and their reports."""
