"""The machine that the trainer runs on: its memory, its limits, its processor."""
